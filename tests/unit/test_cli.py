"""Progress of long work, seen in a log."""

import threading
import time

from breakeven.cli import Progress


def test_work_that_stands_still_is_warned_of_while_it_does(caplog):
    with Progress(total=8, unit="tok", label="responses", silence=0.1) as progress:
        progress.add(3)
        time.sleep(0.5)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings and warnings[0].startswith("responses: nothing for 0 s, at 3/8 tok")


def test_work_that_goes_on_is_not(caplog):
    before = threading.active_count()
    with Progress(total=40, unit="tok", label="responses", silence=1.5) as progress:
        for _ in range(40):
            progress.add(1)
            time.sleep(0.05)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
