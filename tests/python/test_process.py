"""The process around the package: fork, the end of the interpreter, imports."""

import subprocess
import sys
import textwrap

import pytest


def run(code, *arguments):
    done = subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(code), *map(str, arguments)], capture_output=True,
                          text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_it_is_typed_and_wants_no_torch():
    run("""
        import sys, pathlib, ferry_offload
        folder = pathlib.Path(ferry_offload.__file__).parent
        assert (folder / "py.typed").exists() and "class Store" in (folder / "_core.pyi").read_text()
        assert "torch" not in sys.modules
    """)


def test_it_brings_no_libraries_that_another_package_may_want_its_own_of():
    """The first of a name that is loaded counts for the whole process."""
    run("""
        import ferry_offload, numpy
        ones = numpy.ones(8, numpy.float32)
        ferry_offload.update(ferry_offload.Hyper(), 1, ones, p=ones.copy(), m=ones.copy(), v=ones.copy())
        maps = open("/proc/self/maps").read()
        found = [name for name in ("nccl", "cudnn", "cublas", "nvrtc", "cudart", "libmpi", "libcuda.") if name in maps]
        assert "libferry.so" in maps and not found, found
    """)


def test_torch_may_come_after_it():
    pytest.importorskip("torch")
    run("""
        import ferry_offload
        before = set(line.split()[-1] for line in open("/proc/self/maps") if "/" in line)
        import torch
        loaded = set(line.split()[-1] for line in open("/proc/self/maps") if "/" in line) - before
        assert torch.ones(2).sum() == 2 and any("torch" in name for name in loaded)
        folder = str(__import__("pathlib").Path(torch.__file__).parent.parent)
        for name in loaded:  # what it brings of NVIDIA's is its own
            assert not any(part in name for part in ("libnccl", "libcudnn", "libcublas")) or name.startswith(folder), name
    """)


def test_the_end_with_transfers_under_way_leaves_nothing(storage):
    folders = storage / "a", storage / "b"
    for folder in folders:
        folder.mkdir()
    run("""
        import sys, numpy, ferry_offload as ferry
        pool = ferry.Pool("64MiB")
        aio = ferry.Aio([sys.argv[1]], [("1MiB", 8)])
        buffer = pool.reserve("8MiB").numpy()
        flying = [aio.submit_write(aio.allocate(), buffer[i << 20:(i + 1) << 20]) for i in range(8)]
        store = ferry.Store("4MiB", [sys.argv[2]])
        store.register("1MiB", "nvme")
        store.open()
        store.acquire(0, "overwrite").release()
    """, *folders)
    for folder in folders:
        folder.rmdir()  # empty, or this fails


def test_the_end_waits_for_a_step_that_asks_for_a_batch():
    """Which needs the interpreter's lock."""
    assert run("""
        import threading, time, numpy, ferry_offload as ferry
        config = {"model": {"hidden": 16, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate": 16, "vocab": 32},
                  "batch": {"sequence": 8, "micro_batch": 1, "micro_batches": 1}, "steps": 10**6, "threads": 1}
        begun = threading.Event()
        def load(step):
            begun.set()
            time.sleep(0.2)
            return numpy.arange(9).reshape(1, 9)
        engine = ferry.Engine(config, load=load)
        def steps():
            while True:
                engine.step()
        threading.Thread(target=steps, daemon=True).start()
        begun.wait()
        print("ends", flush=True)
    """) == "ends\n"


def test_the_end_waits_for_a_batch_that_is_read_with_ferry(tmp_path):
    """A callback's own calls come back: the step that the end waits for waits for them."""
    (tmp_path / "tokens").write_bytes(bytes(9 * 8))
    assert run("""
        import sys, threading, time, numpy, ferry_offload as ferry
        config = {"model": {"hidden": 16, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate": 16, "vocab": 32},
                  "batch": {"sequence": 8, "micro_batch": 1, "micro_batches": 1}, "steps": 10**6, "threads": 1}
        begun = threading.Event()
        files = ferry.Files()
        file = files.open(sys.argv[1])
        def load(step):
            begun.set()
            time.sleep(0.2)
            batch = numpy.empty((1, 9), numpy.int64)
            try:
                files.read(file, batch)
            except ferry.ClosedError:
                batch[:] = 0
            return batch
        engine = ferry.Engine(config, load=load)
        def steps():
            while True:
                engine.step()
        threading.Thread(target=steps, daemon=True).start()
        begun.wait()
        print("ends", flush=True)
    """, tmp_path / "tokens") == "ends\n"


def test_the_end_while_engines_are_made():
    """They tell of progress, and are in no list of what is to be closed."""
    assert run("""
        import threading, time, ferry_offload as ferry
        config = {"model": {"hidden": 64, "layers": 8, "heads": 1, "kv_heads": 1, "intermediate": 64, "vocab": 320},
                  "batch": {"sequence": 8, "micro_batch": 1, "micro_batches": 1}, "steps": 1, "threads": 1}
        told = threading.Event()
        def progress(stage, bytes, of):
            told.set()
            time.sleep(0.01)
        def make():
            while True:
                ferry.Engine(config, fed=True, progress=progress).close()
        for _ in range(3):
            threading.Thread(target=make, daemon=True).start()
        told.wait()
        print("ends", flush=True)
    """) == "ends\n"


def test_the_end_with_threads_that_wait_in_calls(tmp_path):
    """The interpreter would end them in the midst of their C++, and the process with them."""
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    assert run("""
        import sys, threading, time, ferry_offload as ferry
        files = ferry.Files()
        file = files.open(sys.argv[1])
        def read():
            while True:
                files.read(file, bytearray(1 << 20))
        for _ in range(4):
            threading.Thread(target=read, daemon=True).start()
        time.sleep(0.2)
        print("ends", flush=True)
    """, tmp_path / "a") == "ends\n"


def test_a_child_of_fork_has_no_handles(storage):
    assert run("""
        import os, sys, ferry_offload as ferry
        pool = ferry.Pool("8MiB")
        memory = pool.reserve("1MiB").numpy()
        memory[:] = 1
        store = ferry.Store("4MiB", [sys.argv[1]])
        store.register("1MiB", "nvme")
        store.open()
        child = os.fork()
        if child == 0:
            try:
                store.acquire(0, "overwrite")
            except ferry.ClosedError as error:
                print("fork" in str(error), flush=True)
            sys.exit(0)  # with the interpreter's whole end
        assert os.waitpid(child, 0)[1] == 0
        with store.acquire(0, "overwrite") as lease:
            lease.numpy()[:] = 2
    """, storage) == "True\n"


def test_an_exception_while_a_lease_is_held(storage):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent("""
        import sys, ferry_offload as ferry
        with ferry.Store("4MiB", [sys.argv[1]]) as store:
            store.register("1MiB", "nvme")
            store.open()
            lease = store.acquire(0, "overwrite")
            array = lease.numpy()
            raise RuntimeError("of the program")
    """), str(storage)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "of the program" in done.stderr


@pytest.mark.parametrize("held", ["lease", "array"])
def test_the_end_while_a_daemon_thread_holds_a_lease_leaves_nothing(storage, held):
    """It may be in the midst of numpy's C: its memory stays as long as the process."""
    assert run("""
        import sys, threading, numpy, ferry_offload as ferry
        store = ferry.Store("8MiB", [sys.argv[1]])
        for _ in range(4):
            store.register("1MiB", "nvme")
        store.open()
        for i in range(3):
            with store.acquire(i, "overwrite") as lease:
                lease.numpy()[:] = i
        begun = threading.Event()
        def hold():
            lease = store.acquire(3, "overwrite")
            array = lease.numpy("float32")
            if sys.argv[2] == "array":
                lease.release()
            begun.set()
            while True:
                numpy.add(array, 1, out=array)
        threading.Thread(target=hold, daemon=True).start()
        begun.wait()
        print("ends", flush=True)
    """, storage, held) == "ends\n"


def test_paths_without_permission(tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_bytes(b"1234")
    folder.mkdir()
    for path in (file, folder):
        path.chmod(0)
    tmp_path.chmod(0o711)
    assert run("""
        import os, sys, ferry_offload as ferry
        file, folder = sys.argv[1:]
        store = ferry.Store("4MiB", [folder])
        store.register("1MiB", "nvme")
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may do anything
        with ferry.Files() as files:
            for call in (lambda: files.open(file), lambda: files.open(file, "write"), store.open,
                         lambda: ferry.Aio([folder], [("1MiB", 1)])):
                try:
                    call()
                except ferry.FerryError as error:
                    assert "Permission denied" in str(error) and error.remedy, error
                    print("refused")
    """, file, folder) == "refused\n" * 4
    for path in (file, folder):
        path.chmod(0o700)
