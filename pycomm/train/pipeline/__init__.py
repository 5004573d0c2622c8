"""Pipelines: schedules as data, a clock that predicts them, and a runner without metadata."""
