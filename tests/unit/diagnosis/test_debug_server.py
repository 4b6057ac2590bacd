"""The page of PyTorch's debug server, as version 2.13 has it."""

from __future__ import annotations

from tcpstore_async.diagnosis.debug_server import read_stacks

PAGE = """
    <h1>Stacks</h1>
        <h2>Rank 0: http://vm:38659/handler/dump_traceback?</h2>

            <pre>Current thread 0x00007f6c895246c0 (most recent call first):
  <no Python frame>

Thread 0x00007f6cadc16b80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/tmp/hang/dbg.py", line 7 in <module>
</pre>


        <h2>Rank 1: http://vm:50957/handler/dump_traceback?</h2>

            <pre>Current thread 0x00007fef477c0b80 (most recent call first):
  File "dbg.py", line 6 in <module>
</pre>

        <h2>Rank 2: http://vm:50958/handler/dump_traceback?</h2>

            <p>Failed to fetch: status=408</p>
            <pre>TimeoutError: </pre>

</section>
"""


def test_the_main_threads() -> None:
    assert read_stacks(PAGE) == {
        0: ("barrier (distributed_c10d.py:5356)", "wrapper (c10d_logger.py:83)", "<module> (dbg.py:7)"),
        1: ("<module> (dbg.py:6)",),
    }


def test_another_form_says_nothing() -> None:
    assert read_stacks("<h2>Rank x</h2><pre>File</pre>") == {}
    assert read_stacks(PAGE.replace("Rank 1", "Rank " + "1" * 5000)).keys() == {0}


def test_a_page_without_ends_takes_no_longer_than_another_one() -> None:
    """It was searched once more for each rank: 192 kB took 26 s."""
    assert read_stacks("<h2>Rank 1: </h2><pre>" * 300_000) == {}
