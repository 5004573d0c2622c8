"""The file that PYCOMM_QUIC_KEYLOG names."""

from __future__ import annotations

import io
import os
import stat
import warnings
from typing import TextIO, cast


class KeyLog(io.TextIOBase):
    """A file that only this user reads, to be added to; a full disk ends it and no handshake."""

    def __init__(self, path: str) -> None:
        # Never through a link, and never waiting for a pipe's reader.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(path, flags | os.O_CLOEXEC, 0o600)
        about = os.fstat(self._file)
        is_ours = about.st_uid == os.geteuid() and about.st_nlink == 1
        if not (stat.S_ISREG(about.st_mode) and is_ours):
            self.close()
            raise ValueError(f"PYCOMM_QUIC_KEYLOG: {path} is not a plain file of this user's alone")
        os.fchmod(self._file, 0o600)

    def write(self, text: str) -> int:
        try:
            if self._file >= 0:
                os.write(self._file, text.encode())
        except OSError as error:
            warnings.warn(f"PYCOMM_QUIC_KEYLOG: {error}: no more keys are written", stacklevel=2)
            self._end()
        return len(text)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._end()
        super().close()

    def _end(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def open_key_log(path: str) -> TextIO | None:
    """Of the empty path: none."""
    return cast(TextIO, KeyLog(path)) if path else None
