"""The tiered store, and transfers that a program waits for or awaits."""

import asyncio
import gc
import os
import select
import threading
import time

import numpy as np
import pytest

import ferry_offload as ferry

MIB = 1 << 20


def test_objects_come_back_from_both_tiers(storage):
    with ferry.Store("8MiB", [storage], buffers=2) as store:
        objects = [store.register("1MiB", home) for home in ("nvme", "host", "nvme", "nvme")]
        assert objects == [0, 1, 2, 3]
        store.open()
        for i in objects:
            with store.acquire(i, "overwrite") as lease:
                lease.numpy("int32")[:] = i
        store.prefetch([0, 2])
        for i in objects:
            with store.acquire(i, "write") as lease:
                array = lease.numpy("int32")
                assert (array == i).all()
                array += 1
        store.flush()
        with store.acquire(3) as lease:
            array = lease.numpy("int32")
            assert (array == 4).all()
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
        del array
        stats = store.stats()
        assert stats.acquired == 9 and stats.leased == 0 and stats.reads >= 2 and stats.buffers == 2
        assert "acquired=9" in repr(stats)


def test_an_array_keeps_its_store_open(storage):
    store = ferry.Store("2MiB", [storage])
    store.register(MIB, "nvme")
    store.open()
    array = store.acquire(0, "overwrite").numpy("uint8")  # and its lease, which has no other name
    assert store.stats().leased == 1
    with pytest.raises(ferry.UsageError, match="delete them"):
        store.close()
    array[:] = 1
    del array
    lease = store.acquire(0)
    array = lease.numpy("uint8")
    lease.release()
    assert store.stats().leased == 0 and array[0] == 1  # mapped all the same
    with pytest.raises(ferry.UsageError, match="delete them"):
        store.close()
    del array
    store.close()
    store.close()
    with pytest.raises(ferry.ClosedError):
        store.stats()


def test_what_a_store_refuses(storage):
    store = ferry.Store("2MiB", [storage], buffers=1)
    with pytest.raises(ferry.UsageError, match="not open"):
        store.acquire(0)
    for _ in range(2):
        store.register(MIB, "nvme")
    store.open()
    with pytest.raises(ferry.UsageError, match="never written"):
        store.acquire(0)
    with pytest.raises(ferry.UsageError, match="no such object"):
        store.acquire(7)
    with pytest.raises(ferry.UsageError, match='"read", "write", "overwrite"'):
        store.acquire(0, "append")
    lease = store.acquire(0, "overwrite")
    with pytest.raises(ferry.UsageError, match="leased"):
        store.acquire(0)
    with pytest.raises(ferry.DoesNotFitError, match="every buffer"):
        store.acquire(1, "overwrite")
    with pytest.raises(ferry.UsageError, match="arrays or leases"):
        store.close()
    lease.release()
    assert lease.released
    with pytest.raises(ferry.FerryError):
        lease.release()
    with pytest.raises((ferry.UsageError, BufferError), match="released"):
        memoryview(lease)
    with pytest.raises(ferry.UsageError, match="released"):
        np.from_dlpack(lease)
    store.close()


def test_budgets_and_paths_that_cannot_be(storage):
    store = ferry.Store(MIB, [storage])
    store.register(2 * MIB, "host")
    with pytest.raises(ferry.DoesNotFitError) as caught:
        store.open()
    assert "2097152" in caught.value.measured
    with pytest.raises(ferry.UsageError, match="list of paths"):
        ferry.Store(MIB, str(storage))
    with pytest.raises(ferry.FerryError, match="/no/such/folder"):
        ferry.Aio(["/no/such/folder"], [(MIB, 1)])


def pattern(seed):
    return np.random.default_rng(seed).integers(0, 256, MIB, np.uint8)


@pytest.fixture
def pool():
    return ferry.Pool("16MiB")


def test_a_transfer_waited_for(storage, pool):
    buffer = pool.reserve(MIB).numpy()
    with ferry.Aio([storage], [(MIB, 2)]) as aio:
        first, second = aio.allocate(), aio.allocate()
        assert aio.allocate() is None and aio.slot_bytes() == MIB
        for slot in (first, second):
            buffer[:] = pattern(slot)
            assert aio.write(slot, buffer) == MIB
        aio.flush()
        for slot in (first, second):
            buffer[:] = 0
            assert aio.read(slot, buffer) == MIB
            np.testing.assert_array_equal(buffer, pattern(slot))
        assert aio.stats().reads == 2 and aio.in_flight == 0
        aio.free(first)
        with pytest.raises(ferry.UsageError, match="not allocated"):
            aio.read(first, buffer)


def test_many_transfers_awaited(storage, pool):
    buffers = [pool.reserve(MIB, name=str(i)).numpy() for i in range(4)]

    async def all_of(aio):
        slots = [aio.allocate() for _ in buffers]
        for slot, buffer in zip(slots, buffers):
            buffer[:] = pattern(slot)
        await asyncio.gather(*(aio.submit_write(s, b) for s, b in zip(slots, buffers)))
        for buffer in buffers:
            buffer[:] = 0
        ticks = 0

        async def others():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(others())
        counts = await asyncio.gather(*(aio.submit_read(s, b, priority="urgent") for s, b in zip(slots, buffers)))
        other.cancel()
        assert counts == [MIB] * 4 and ticks > 0
        for slot, buffer in zip(slots, buffers):
            np.testing.assert_array_equal(buffer, pattern(slot))

    # More are asked for than may be under way.
    with ferry.Aio([storage], [(MIB, 4)], operations_max=2) as aio:
        asyncio.run(all_of(aio))


def test_awaiting_can_be_given_up(tmp_path):
    """The others' transfers go on being looked at, and a loop after this one starts anew."""
    (tmp_path / "a").write_bytes(b"0123456789" * 10_000)

    async def give_up(files, file):
        buffers = [bytearray(10_000) for _ in range(10)]
        tasks = [asyncio.ensure_future(read(files, file, buffer, i * 10_000)) for i, buffer in enumerate(buffers)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert found[1::2] == [10_000] * 5 and all(bytes(buffer) == b"0123456789" * 1000 for buffer in buffers[1::2])
        assert all(one == 10_000 or isinstance(one, asyncio.CancelledError) for one in found[::2])

    async def read(files, file, buffer, offset):
        return await files.submit_read(file, buffer, offset)

    with ferry.Files() as files:
        file = files.open(tmp_path / "a")
        for _ in range(3):
            asyncio.run(give_up(files, file))


def test_one_transfer_may_be_awaited_twice(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")

    async def twice(files, file):
        transfer = files.submit_read(file, bytearray(10))
        return await asyncio.gather(wait(transfer), wait(transfer), wait(transfer))

    async def wait(transfer):
        return await transfer

    with ferry.Files() as files:
        assert asyncio.run(twice(files, files.open(tmp_path / "a"))) == [10] * 3


def test_the_result_of_a_transfer_outlives_its_handle(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    with ferry.Files() as files:
        transfer = files.submit_read(files.open(tmp_path / "a"), bytearray(10))
        transfer.wait()

    async def wait():
        return await transfer

    assert asyncio.run(wait()) == 10


def test_loops_and_threads_share_one_handle(tmp_path):
    """Each of them also finds what the others wait for, and tells them."""
    (tmp_path / "a").write_bytes(bytes(range(250)) * 400)

    async def await_all(files, file):
        async def read_some():
            for i in range(0, 100_000, 5000):
                buffer = bytearray(5000)
                assert await files.submit_read(file, buffer, i) == 5000 and bytes(buffer) == bytes(range(250)) * 20
        await asyncio.wait_for(asyncio.gather(*(read_some() for _ in range(4))), 60)

    def wait_all(files, file):
        for i in range(0, 100_000, 500):
            assert files.read(file, bytearray(500), i) == 500

    def work(job):
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - told below
            wrong.append(error)

    wrong = []
    open_before = set(os.listdir("/proc/self/fd"))
    with ferry.Files() as files:
        file = files.open(tmp_path / "a")
        jobs = [lambda: asyncio.run(await_all(files, file))] * 3 + [lambda: wait_all(files, file)] * 2
        threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert files.in_flight == 0
    assert not wrong and set(os.listdir("/proc/self/fd")) <= open_before


def test_a_loop_that_awaits_sleeps_until_the_drive_has_read(tmp_path, monkeypatch):
    """It is woken, and neither looks now and then nor is held up."""
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(time, "sleep", None)

    async def both(files, file):
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", None)
        monkeypatch.setattr(loop, "call_at", None)
        for _ in range(20):
            assert await files.submit_read(file, bytearray(1 << 20)) == 1 << 20

    with ferry.Files() as files:
        asyncio.run(both(files, files.open(tmp_path / "a")))


def test_closing_wakes_who_awaits(storage, pool):
    async def read(transfer):
        return await transfer

    async def close(aio, slot, buffer):
        tasks = [asyncio.ensure_future(read(aio.submit_write(slot, buffer))) for _ in range(100)]
        await asyncio.sleep(0)
        aio.close()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    buffer = pool.reserve(MIB).numpy()
    aio = ferry.Aio([storage], [(MIB, 1)])
    found = asyncio.run(close(aio, aio.allocate(), buffer))
    assert len(found) == 100 and all(one == MIB or isinstance(one, ferry.CancelledError) for one in found)
    assert isinstance(found[-1], ferry.CancelledError)
    with pytest.raises(ferry.ClosedError):
        aio.fileno()


def test_a_descriptor_for_select(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    with ferry.Files() as files:
        file = files.open(tmp_path / "a")
        assert files.fileno() == files.fileno()
        transfer = files.submit_read(file, bytearray(10))
        while not transfer.done():
            assert select.select([files], [], [], 60)[0] == [files]
        assert transfer.result() == 10


def test_threads_share_one_volume(storage, pool):
    buffers = [pool.reserve(MIB, name=str(i)).numpy() for i in range(4)]
    wrong = []

    def work(aio, buffer, seed):
        slot = aio.allocate()
        for i in range(20):
            buffer[:] = seed + i
            aio.write(slot, buffer)
            buffer[:] = 0
            aio.read(slot, buffer)
            if not (buffer == seed + i).all():
                wrong.append(seed)

    with ferry.Aio([storage], [(MIB, 4)]) as aio:
        threads = [threading.Thread(target=work, args=(aio, b, 20 * i)) for i, b in enumerate(buffers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_buffer_lives_as_long_as_its_transfer(storage):
    with ferry.Aio([storage], [(MIB, 1)]) as aio:
        slot = aio.allocate()
        pool = ferry.Pool("4MiB")
        transfer = aio.submit_write(slot, pool.reserve(MIB).numpy())
        del pool
        gc.collect()
        assert transfer.wait() == MIB and transfer.done() and transfer.seconds > 0


def test_closing_ends_what_is_under_way(storage, pool):
    buffer = pool.reserve(MIB).numpy()
    aio = ferry.Aio([storage], [(MIB, 1)])
    slot = aio.allocate()
    transfers = [aio.submit_write(slot, buffer) for _ in range(20)]
    aio.close()
    for transfer in transfers:
        assert transfer.done()
    with pytest.raises(ferry.CancelledError):
        transfers[-1].wait()
    aio.close()
    with pytest.raises(ferry.ClosedError):
        aio.read(slot, buffer)


@pytest.mark.parametrize(("use", "says"), [
    (lambda aio, slot, b: aio.read(slot, b[1:4097]), "not aligned"),
    (lambda aio, slot, b: aio.read(slot, b[:4096], offset=100), "offset is not aligned"),
    (lambda aio, slot, b: aio.read(slot, b, offset=4096), "out of range"),
    (lambda aio, slot, b: aio.read(99, b), "not allocated"),
    (lambda aio, slot, b: aio.read(slot, b[::2]), "not contiguous"),
    (lambda aio, slot, b: aio.read(slot, bytes(4096)), "cannot be written"),
    (lambda aio, slot, b: aio.submit_read(slot, b, priority="now"), '"urgent"'),
])
def test_what_a_transfer_refuses(storage, pool, use, says):
    with ferry.Aio([storage], [(MIB, 1)]) as aio:
        with pytest.raises(ferry.UsageError, match=says):
            use(aio, aio.allocate(), pool.reserve(MIB).numpy())
        assert aio.in_flight == 0


# ---------------------------------------------------------------- files of the program's own

@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("backend", ["auto", "posix"])
def test_files_at_any_offset(tmp_path, backend, direct):
    path, data = tmp_path / "a", np.random.default_rng(1).integers(0, 256, 50_001, np.uint8)
    with ferry.Files(backend=backend, direct=direct, block="16KiB", queue_depth=4) as files:
        file = files.open(path, "write")
        for offset in (0, 7, 4096):
            assert files.write(file, data, offset) == data.nbytes
            back = np.zeros_like(data)
            assert files.read(file, back, offset) == data.nbytes
            assert (back == data).all() and files.size(file) == offset + data.nbytes
        files.flush(file)
        with open(tmp_path / "b", "wb") as opened:
            other = files.open(opened.fileno())
            transfers = [files.submit_write(other, data[i:i + 1000], i) for i in range(0, 50_000, 1000)]
            assert sum(transfer.wait() for transfer in transfers) == 50_000 and files.in_flight == 0
            files.close_file(other)
    assert (tmp_path / "b").read_bytes() == data[:50_000].tobytes()
    assert path.read_bytes()[4096:] == data.tobytes()


def test_a_file_is_awaited(tmp_path):
    async def both():
        with ferry.Files() as files:
            file = files.open(tmp_path / "a", "write")
            await files.submit_write(file, b"hello, ferry", 3)
            back = bytearray(5)
            assert await files.submit_read(file, back, 10, priority="urgent") == 5
            return bytes(back)

    assert asyncio.run(both()) == b"ferry"


def test_what_files_refuse(tmp_path):
    (tmp_path / "a").write_bytes(b"1234")
    with ferry.Files() as files:
        file = files.open(tmp_path / "a")
        for call, error, says in ((lambda: files.open(tmp_path / "none"), ferry.StorageError, "No such file(?s:.*)correct the path"),
                                  (lambda: files.open(tmp_path, "write"), ferry.UsageError, "no file"),
                                  (lambda: files.open(tmp_path / "a", "append"), ferry.UsageError, '"append"'),
                                  (lambda: files.read(file, bytearray(5)), ferry.StorageError, "shorter"),
                                  (lambda: files.write(file, b"1"), ferry.UsageError, "opened for reading"),
                                  (lambda: files.read(7, bytearray(1)), ferry.UsageError, "not open")):
            with pytest.raises(error, match=says):
                call()
        files.close_file(file)
    with pytest.raises(ferry.ClosedError):
        files.open(tmp_path / "a")


@pytest.mark.parametrize("name, said", [("a\0b", "NUL"), (b"a\0b", "NUL"), ("", "empty")])
def test_paths_that_c_would_cut(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_bytes(b"mine")
    with ferry.Files() as files, ferry.Pool("4MiB") as pool:
        for take in (lambda: files.open(name, "write"), lambda: ferry.Path(name), lambda: ferry.Store("8MiB", [name]),
                     lambda: ferry.Aio([name], [(MIB, 1)]), lambda: ferry.Engine(name), lambda: ferry.Engine({}, checkpoint=name)):
            with pytest.raises(ferry.UsageError, match=said):
                take()
        if name:
            with pytest.raises(ferry.UsageError, match="NUL"):
                ferry.Engine({}, overrides=["steps=1\0"])
            with pytest.raises(ferry.UsageError, match="NUL"):
                pool.reserve("2MiB", "a\0b")
        with pytest.raises(TypeError):
            files.open(3.5)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_path_of_any_bytes(tmp_path):
    """That the system takes, though it is no UTF-8."""
    path = bytes(tmp_path) + b"/\xff"
    with ferry.Files() as files:
        files.write(files.open(path, "write"), b"abc")
        assert files.read(files.open(tmp_path / "\udcff"), bytearray(3)) == 3
