"""Our FileStores and PyTorch's on one file, in many processes at once."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tcpstore_async import FileStore
from torch_forker import Program

torch = pytest.importorskip("torch")

WORKER = """
import datetime, sys, time
which, path, name, rank, world, times = *sys.argv[1:4], *map(int, sys.argv[4:])
if which == "ours":
    from tcpstore_async import FileStore
else:
    from torch.distributed import FileStore
store = FileStore(path, world)
store.set_timeout(datetime.timedelta(seconds=100))
store.set(f"{name}/{rank}", f"value {rank}")


def meet(name):
    store.add(name, 1)
    while int(store.get(name)) < world:
        time.sleep(0.05)


meet("there")
for _ in range(times):
    store.add("counter", 1)
meet("done")
for other in range(world // 2):
    for kind in ("ours", "torch"):
        assert store.get(f"{kind}/{other}") == f"value {other}".encode()
print(int(store.get("counter")), flush=True)
meet("read")
del store
"""


@pytest.mark.timeout(300)
def test_sixteen_processes_share_one_file(tmp_path: Path) -> None:
    """8 of ours and 8 of PyTorch's, each adding 100 times to one counter."""
    path = tmp_path / "store"
    with ExitStack() as stack:
        processes = [
            stack.enter_context(Program(WORKER, which, path, which, rank, 16, 100))
            for rank in range(8)
            for which in ("ours", "torch")
        ]
        said = [process.output(250) for process in processes]
        assert [process.wait() for process in processes] == [0] * 16, [process.errors() for process in processes]
    assert said == ["1600\n"] * 16
    assert not path.exists()


def test_each_reads_what_the_other_writes(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    theirs = torch.distributed.FileStore(path, 2)
    with FileStore(path, 2) as ours:
        theirs.set("a", b"\x00\xff")
        assert ours.get("a") == b"\x00\xff"
        ours.set("b", "")
        assert theirs.get("b") == b""
        assert ours.add("n", 3) == theirs.add("n", 4) - 4 == 3
        assert ours.compare_set("n", "7", "8") == b"8"
        assert theirs.compare_set("n", "8", "9") == b"9"
        ours.append("n", "0")
        assert theirs.add("n", 1) == 91
        assert ours.num_keys() == theirs.num_keys() == 4
        theirs.delete_key("a")
        assert not ours.check(["a"])
        assert ours.delete_key("b")
        assert not theirs.check(["b"])
        assert sorted(ours.list_keys()) == ["n"]
        del theirs
        assert ours.num_keys() == 3
    assert not Path(path).exists()


def test_queues_do_not_disturb_pytorch(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    theirs = torch.distributed.FileStore(path, 2)
    with FileStore(path, 2) as ours:
        for item in ("1", "2"):
            ours.queue_push("q", item)
        theirs.set("q", "value")
        assert theirs.get("q") == b"value"
        assert ours.queue_pop("q") == b"1"
        assert ours.num_keys() == 2
        assert theirs.add("n", 1) == 1
        assert ours.queue_pop("q") == b"2"
        del theirs
    assert not Path(path).exists()


@pytest.mark.parametrize("last", ["ours", "theirs"])
@pytest.mark.parametrize(("world", "goes"), [(2, True), (1, True), (0, True), (3, False), (-1, False)])
def test_the_file_is_removed_when_pytorch_would_remove_it(tmp_path: Path, last: str, world: int, goes: bool) -> None:
    path = str(tmp_path / "store")
    theirs = torch.distributed.FileStore(path, world)
    ours = FileStore(path, world)
    if last == "theirs":
        ours.close()
        assert Path(path).exists()
        del theirs
    else:
        del theirs
        assert Path(path).exists()
        ours.close()
    assert Path(path).exists() != goes


def test_file_is_identical_to_pytorch_s(tmp_path: Path) -> None:
    """Our file is identical to PyTorch's, byte for byte."""

    def use(store: object) -> None:
        assert isinstance(store, (FileStore, torch.distributed.FileStore))
        store.set("k", "v")
        store.add("n", 1)
        store.add("n", 1)
        store.compare_set("n", "2", "x")
        store.compare_set("n", "2", "y")
        store.delete_key("k")

    theirs = torch.distributed.FileStore(str(tmp_path / "theirs"), 5)
    use(theirs)
    del theirs
    with FileStore(str(tmp_path / "ours"), 5) as ours:
        use(ours)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
