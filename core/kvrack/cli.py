"""`kvrack`, the command line's entry point. What it runs is in `kvrack.commands`, which needs the extra ``cli``."""

from __future__ import annotations

import io
import sys

LIBRARIES = ("click", "rich")


def main() -> int:
    """Run the command line on `sys.argv`. Exits with 2 and one line on stderr when something is wrong."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A model may write what a terminal's encoding has no character for.
            stream.reconfigure(errors="replace")
    try:
        from kvrack.commands import kvrack
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in LIBRARIES:
            raise
        print(f"error: the command line needs {missing}, which is not installed. Run: pip install 'kvrack[cli]'",
              file=sys.stderr)  # fmt: skip
        return 2
    kvrack.main(prog_name="kvrack")
    return 0


if __name__ == "__main__":
    sys.exit(main())
