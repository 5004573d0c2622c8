"""Checkpoints that are whole or not there.

A checkpoint is a folder of safetensors files, which torch's distributed checkpointing writes and
reads (so another layout or number of ranks can load it), and a manifest with the sizes and
checksums of all of them. It is written under another name; the manifest comes last, then the folder
gets its name, so a folder with the right name is complete. What fails its checksums is skipped with
a word. Nothing in it is a pickle.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from pycomm._loader import torch_module
from pycomm.train.agreement import AgreedError
from pycomm.train.layout.tensor import like, local_tensor
from pycomm.train.manifest import (
    FORMAT,
    PARTIAL,
    Found,
    Manifest,
    checksum,
    commit,
    names,
    open_checkpoint,
    put_aside,
    verify,
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the run's state is as before."""


def load_alone(found: Found, tensors: dict[str, torch.Tensor]) -> None:
    """Reads a checkpoint's values into whole tensors, without a group."""
    dcp_load(tensors, storage_reader=HuggingFaceStorageReader(str(found.path)), no_dist=True)


class Checkpoints:
    """The checkpoints of one run. All methods are collective.

    Args:
        folder: on storage that all ranks see.
        say: takes a line for the person who watches.
        group: of all ranks, used by nothing else: saving talks from another thread.
    """

    def __init__(
        self,
        folder: Path,
        keep_last_n: int,
        *,
        is_async: bool,
        say: Callable[[str], None],
        group: dist.ProcessGroup,
    ) -> None:
        self._folder, self._keep, self._is_async = folder, keep_last_n, is_async
        self._say, self._group = say, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._staged: dict[str, torch.Tensor] = {}

    def save(self, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Writes a checkpoint; with `is_async` only copies, and writes in another thread.

        Raises:
            CheckpointError: this one could not be written, or the one before could not and nobody
                has asked (then this one is not written either); on every rank.
        """
        self.wait()
        self._staged = _copy(tensors, self._staged)
        if self._is_async:
            self._thread = threading.Thread(
                target=self._write_aside, args=(step, state), name="pycomm-checkpoint"
            )
            self._thread.start()
        else:
            self._write_safely(step, state)
            self._raise()

    def wait(self) -> None:
        """Until what was being written is there.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def newest(self) -> Found | None:
        """The newest checkpoint whose files are all as they were written."""
        for path in self._candidates():
            fault = self._agree(verify(path, self._rank, self._size))
            if not fault:
                return open_checkpoint(path)
            if self._rank == 0:
                self._say(f"skipping checkpoint {path.name}: {fault}")
                put_aside(path, "damaged")  # it counts no more, and nothing is lost
        return None

    def set_aside(self) -> None:
        """Renames the folder of checkpoints, if there is one: a run starts anew.

        Raises:
            AgreedError: it cannot be renamed.
        """
        fault = ""
        try:
            if self._rank == 0 and names(self._folder):
                where = put_aside(self._folder, "before")
                self._say(f"older checkpoints are in {where}")
        except OSError as error:
            fault = str(error)
        fault = self._agree(fault)
        if fault:
            raise AgreedError(f"checkpoints cannot be set aside: {fault}")

    def names_in(self, found: Found) -> set[str]:
        """Of all tensors in a checkpoint."""
        reader = HuggingFaceStorageReader(str(found.path))
        return set(reader.read_metadata().state_dict_metadata)

    def load(self, found: Found, tensors: dict[str, torch.Tensor]) -> None:
        """Reads a checkpoint's values into tensors, however they are sharded.

        Raises:
            AgreedError: it has no such tensor, one of another shape, or one that no rank wants.
        """
        fault = self._agree(self._misfit(found, tensors))
        if fault:
            raise AgreedError(
                f"checkpoint {found.path}: {fault}; give another run.out, or the model it was "
                "made with"
            )
        dcp_load(
            tensors,
            storage_reader=HuggingFaceStorageReader(str(found.path)),
            process_group=self._group,
        )

    def _misfit(self, found: Found, tensors: dict[str, torch.Tensor]) -> str:
        known = HuggingFaceStorageReader(str(found.path)).read_metadata().state_dict_metadata
        wanted: list[Any] = [None] * self._size
        dist.all_gather_object(wanted, list(tensors), group=self._group)
        unwanted = set(known) - {name for one in wanted for name in one}
        if unwanted:
            return f"it has '{min(unwanted)}', which the run has not"
        for name, tensor in tensors.items():
            there = known.get(name)
            if there is None:
                return f"it has no '{name}'"
            size = tuple(getattr(there, "size", ()))
            if size != tuple(tensor.shape):
                return f"it has {size} for '{name}', the run wants {tuple(tensor.shape)}"
        return ""

    # Writing -------------------------------------------------------------------------------

    def _write_aside(self, step: int, state: dict[str, Any]) -> None:
        # What this thread waits for, training does not.
        torch_module().leave_out_this_thread()
        self._write_safely(step, state)

    def _write_safely(self, step: int, state: dict[str, Any]) -> None:
        partial = self._folder / f"step-{step:08d}{PARTIAL}"
        error: BaseException | None = None
        try:
            self._write(partial, step, state)
        except BaseException as caught:
            error = caught
            if self._rank == 0:  # what was begun takes no room on a full disk
                shutil.rmtree(partial, ignore_errors=True)
        self._error = error

    def _write(self, partial: Path, step: int, state: dict[str, Any]) -> None:
        # torch writes what several ranks hold once, and tells every rank if one fails.
        fault = ""
        try:
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True, mode=0o700)
        except OSError as error:
            fault = str(error)
        self._must(self._agree(fault))
        try:
            dcp_save(
                self._staged,
                storage_writer=HuggingFaceStorageWriter(str(partial), save_distributed=True),
                process_group=self._group,
            )
        except OSError as error:
            fault = str(error)
        except CheckpointException as error:
            fault = "; ".join(f"rank {r}: {e[0]}" for r, e in error.failures.items())
        self._must(self._agree(fault))
        own: dict[str, Any] = {}
        try:
            for file in sorted(partial.glob("*.safetensors"))[self._rank :: self._size]:
                own[file.name] = {"bytes": file.stat().st_size, "blake2b": checksum(file)}
        except OSError as error:
            fault = str(error)
        self._must(self._agree(fault))
        files: list[Any] = [None] * self._size
        dist.all_gather_object(files, own, group=self._group)
        if self._rank == 0:
            try:
                entries = {name: entry for part in files for name, entry in part.items()}
                manifest = Manifest(format=FORMAT, step=step, state=state, files=entries)
                final = commit(partial, manifest.model_dump_json(indent=1))
                self._prune(final.name)
            except OSError as error:
                fault = str(error)
        self._must(self._agree(fault))

    def _must(self, fault: str) -> None:
        if fault:
            raise CheckpointError(f"no checkpoint was written to {self._folder}: {fault}")

    def _prune(self, newest: str) -> None:
        """Keeps the one just written and the newest few others; what was begun and never finished
        goes too."""
        others = [name for name in names(self._folder) if name != newest]
        for name in others[self._keep - 1 :]:
            shutil.rmtree(self._folder / name, ignore_errors=True)
        for path in self._folder.glob(f"step-*{PARTIAL}"):
            shutil.rmtree(path, ignore_errors=True)

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _candidates(self) -> list[Path]:
        """Newest first, as rank 0 sees them."""
        found: list[Any] = [names(self._folder) if self._rank == 0 else None]
        dist.broadcast_object_list(
            found, src=dist.get_global_rank(self._group, 0), group=self._group
        )
        return [self._folder / name for name in found[0] or []]

    def _agree(self, fault: str) -> str:
        """The first rank's fault that has one, on every rank."""
        faults: list[Any] = [None] * self._size
        dist.all_gather_object(faults, fault, group=self._group)
        return next(
            (f"rank {r}: {f}" if self._size > 1 else f for r, f in enumerate(faults) if f), ""
        )


def _copy(
    tensors: dict[str, torch.Tensor], into: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copies local parts, into the memory of the copy before where there is one."""
    result = {}
    for name, tensor in tensors.items():
        source = local_tensor(tensor)
        target = local_tensor(into[name]) if name in into else None
        if target is None or target.shape != source.shape:
            target = torch.empty_like(source, memory_format=torch.contiguous_format)
        target.copy_(source)
        result[name] = like(target, tensor)
    return result
