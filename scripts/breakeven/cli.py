"""What every script shares: one-sentence errors, exit codes, log lines and progress.

A script of this project is a thin command line over the library:

    def main() -> None:
        parser = cli.parser(__doc__)
        ...

    if __name__ == "__main__":
        cli.run(main)
"""

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger("breakeven")


class UserError(Exception):
    """Bad input: one sentence that says what is wrong, where (file, key, row) and what to do."""


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the docstring's line breaks and prints every default."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser whose help is the script's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=Formatter, allow_abbrev=False)


def run(main: Callable[[], int | None]) -> None:
    """Run a script's main function and exit: 0 done, 1 a UserError or a full disk, 130 interrupted.

    SIGTERM, and SIGHUP of a terminal that is closed, are turned into SystemExit, so that `finally` blocks stop servers and
    remove partial files. A job ends with the Snakemake that started it (BREAKEVEN_PARENT, set in rules/common.smk), which
    cannot stop it once it has been killed.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    parent = os.environ.get("BREAKEVEN_PARENT", "")
    if parent.isdigit():
        threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        # torch.save hides what stopped it behind an error of its own.
        first = next(
            (e for e in _chain(error) if isinstance(e, (SystemExit, KeyboardInterrupt)) or _disk_is_full(e)), None
        )
        if first is None:
            raise
        if isinstance(first, SystemExit):
            sys.exit(first.code)
        if isinstance(first, KeyboardInterrupt):
            sys.exit(130)
        where = f" while writing {first.filename}" if getattr(first, "filename", None) else ""
        print(f"error: the disk is full{where}; free some space and run the same command again", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those that were being handled when it was raised."""
    while error is not None:
        yield error
        error = error.__context__


def _disk_is_full(error: BaseException) -> bool:
    """ENOSPC or EDQUOT; safetensors says it in an exception of its own."""
    return getattr(error, "errno", None) in (28, 122) or "No space left on device" in str(error)


def _end_with(parent: int, poll_s: float = 1.0, grace_s: float = 60.0) -> None:
    """Send SIGTERM to this process once `parent` is gone, and end it after a grace period; Linux."""
    stat = Path(f"/proc/{parent}/stat")
    try:
        while stat.read_text().rpartition(")")[2].split()[0] not in "XZ":
            time.sleep(poll_s)
    except (FileNotFoundError, ProcessLookupError):
        pass
    logger.warning("the Snakemake that started this job is gone, so it stops")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(143)


class Progress:
    """Progress of long work: a tqdm bar on a terminal, one plain line every `every` seconds in a log.

    Where nothing is done for `silence` seconds, a warning says so, as often as that goes on: an engine that hangs says nothing.

    >>> with Progress(total=100, unit="tok", label="responses") as progress:
    ...     progress.add(50)
    """

    def __init__(self, total: int, unit: str, label: str, done: int = 0, every: float = 10.0, silence: float = 300.0):
        self.total, self.unit, self.label, self.every, self.silence = total, unit, label, every, silence
        self.done, self.started_with = done, done
        self.start = self.last = self.moved = time.monotonic()
        self.ended = threading.Event()
        self.bar = None
        if sys.stderr.isatty() and logger.isEnabledFor(logging.INFO):
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=done, unit=unit, desc=label, smoothing=0.1)

    def add(self, n: int, note: str = "") -> None:
        """Count `n` more units; `note` is shown behind the line."""
        self.done += n
        self.moved = time.monotonic()
        if self.bar is not None:
            self.bar.update(n)
            self.bar.set_postfix_str(note)
        elif time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            self._line(note)

    def elapsed(self) -> float:
        """Seconds since the start of this run."""
        return max(time.monotonic() - self.start, 1e-9)

    def _line(self, note: str = "") -> None:
        rate = (self.done - self.started_with) / self.elapsed()
        left = (self.total - self.done) / rate if rate else float("inf")
        eta = f", {left:.0f} s left" if 0 < left < float("inf") else ""
        logger.info(
            "%s: %d/%d %s, %.1f %s/s%s%s", self.label, self.done, self.total, self.unit, rate, self.unit, eta,
            f", {note}" if note else "",
        )  # fmt: skip

    def _watch(self) -> None:
        while not self.ended.wait(self.silence):
            quiet = time.monotonic() - self.moved
            if quiet >= self.silence:
                logger.warning(
                    "%s: nothing for %.0f s, at %d/%d %s", self.label, quiet, self.done, self.total, self.unit
                )

    def __enter__(self):
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        if self.bar is not None:
            self.bar.close()
        else:
            self._line()
