"""Text as a memory-mapped file of tokens, and which sequence comes when."""
