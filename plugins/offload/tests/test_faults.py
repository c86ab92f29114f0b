"""A place that fails: what is said, what is kept, and that no file is left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from offload_helpers import expect_alike, expect_state, feed, spec, state_of, states

import kvrack
from kvrack_offload.homes import Home
from kvrack_offload.spill import SpillFile

INNERS = [
    pytest.param({"inner": "dynamic"}, id="dynamic"),
    pytest.param({"inner": "static"}, id="static"),
    pytest.param({"inner": "fp8"}, id="fp8"),
    pytest.param({"inner": "fp8", "inner_config": {"layout": "static", "max_cache_len": 512}}, id="fp8-static"),
    pytest.param({"inner": "stranger"}, id="stranger"),
]


@pytest.fixture(autouse=True)
def _stranger(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.syspath_prepend(request.path.parent / "stranger")
    kvrack.registry.refresh()
    yield
    kvrack.registry.refresh()


@pytest.fixture(params=INNERS)
def inner(request: pytest.FixtureRequest) -> dict[str, object]:
    """The config of a held backend that is installed."""
    name = request.param["inner"]
    if name not in kvrack.backends():
        pytest.skip(f"the held backend is kvrack-{name}'s: pip install kvrack-{name}")
    return request.param


@contextlib.contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """No file of this process may grow past `nbytes`, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


# --- no room ------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_that_loses_nothing(on_disk, tmp_path):
    cache, twin = on_disk("full", "sliding", "full"), kvrack.create_cache("dynamic", spec("full", "sliding", "full"))
    for each in (cache, twin):
        feed(each, (100, 1, 1))
    (file,) = files(tmp_path)
    before = [state_of(layer) for layer in cache.layers]
    with file_limit(file.stat().st_size):
        with pytest.raises(kvrack.MemoryRefused, match=r"no room for .* more bytes in offload file") as caught:
            cache.update(*states(900), 0)
        assert str(file) in str(caught.value)
        for layer, state in zip(cache.layers, before, strict=True):
            expect_state(layer, state)
    # With room again it goes on as if nothing had been.
    expect_alike(cache, twin, new=900)
    expect_alike(cache, twin)


def _fails_at(monkeypatch: pytest.MonkeyPatch, method: str, call: int, error: BaseException) -> list[int]:
    """Have the call of this number of `Home`'s method raise; return a list that grows by one at each call."""
    calls: list[int] = []
    original = getattr(Home, method)

    def counted(self, *arguments):
        calls.append(len(calls))
        if len(calls) == call:
            raise error
        return original(self, *arguments)

    monkeypatch.setattr(Home, method, counted)
    return calls


@pytest.mark.parametrize("method", ["reserve", "write"])
@pytest.mark.parametrize("error", [kvrack.MemoryRefused("none left"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_an_update_that_fails_anywhere_is_undone(on_disk, inner, method, error):
    refused = 0
    for fill, new in (((), 40), ((9, 1), 1), ((9, 1), 70)):
        for call in range(1, 30):
            cache, twin = on_disk("full", "full", **inner), on_disk("full", "full", **inner)
            for each in (cache, twin):
                feed(each, fill)
            before = state_of(cache.layers[0])
            with pytest.MonkeyPatch.context() as patch:
                calls = _fails_at(patch, method, call, error)
                try:
                    cache.update(*states(new, seed=77), 0)
                except type(error):
                    refused += 1
                else:
                    assert len(calls) < call
                    break
            if before[0]:
                expect_state(cache.layers[0], before)
            else:
                assert cache.layers[0].get_seq_length() == 0
            expect_alike(cache, twin, new=new)
            expect_alike(cache, twin)
    assert refused >= (4 if method == "write" else 1)


def test_rows_reordered_on_a_full_disk_stay_as_they_were(on_disk, inner):
    cache, twin = on_disk("full", **inner), on_disk("full", **inner)
    for each in (cache, twin):
        feed(each, (9, 1))
    for call in (1, 2):
        with pytest.MonkeyPatch.context() as patch:
            _fails_at(patch, "write", call, kvrack.MemoryRefused("none left"))
            with pytest.raises(kvrack.MemoryRefused):
                cache.reorder_cache(torch.tensor([1, 0]))
        expect_alike(cache, twin)


# --- a folder or a file that isn't what it should be ---------------------------------------------


@pytest.mark.parametrize("what", ["missing", "file", "read-only"])
def test_a_folder_that_cannot_be_written_is_named_when_the_cache_is_built(tmp_path, monkeypatch, what):
    folder = tmp_path / "there"
    if what == "file":
        folder.touch()
    elif what == "read-only":
        folder.mkdir()
        # Whoever runs the tests as root may write everywhere.
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(kvrack.OffloadError, match=r"folder='.*there': expected a folder that can be written"):
        kvrack.create_cache("offload", spec("full"), tier="disk", folder=str(folder))


def test_a_folder_that_went_since_is_named_at_the_first_update(tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    cache = kvrack.create_cache("offload", spec("full"), tier="disk", folder=str(folder))
    folder.rmdir()
    with pytest.raises(kvrack.OffloadError, match=r"no file can be made in .*there"):
        cache.update(*states(3), 0)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("left", [0, 1000])
def test_a_truncated_file_is_an_error_and_never_zeros(on_disk, tmp_path, left):
    cache, other = on_disk("full", "full", "full", "full"), on_disk("full")
    feed(cache, (50, 1))
    feed(other, (50, 1))
    expected = state_of(other.layers[0])
    path = cache.layers[0]._hold.station.prefetcher._file.path
    os.truncate(path, left)
    for _ in range(2):
        with pytest.raises(kvrack.OffloadError, match=f"{path.name} was truncated by something else"):
            # The first of them may be in a slot still: it can't be written any more.
            feed(cache, (1,))
    with pytest.raises(kvrack.OffloadError, match="truncated"):
        copy.deepcopy(cache)
    expect_state(other.layers[0], expected)
    del cache
    gc.collect()
    assert not path.exists()


def test_room_made_while_another_thread_reads_is_no_truncation(tmp_path, monkeypatch):
    file, out = SpillFile(tmp_path), torch.empty(8, dtype=torch.uint8)
    file.take(1 << 16)
    fstat = os.fstat

    def grows_meanwhile(descriptor):
        status = fstat(descriptor)
        monkeypatch.setattr(os, "fstat", fstat)
        file.take(1 << 16)
        return status

    monkeypatch.setattr(os, "fstat", grows_meanwhile)
    file.read(0, out)
    assert os.fstat is fstat


def test_a_file_whose_name_is_gone_serves_on(on_disk, tmp_path):
    cache, twin = on_disk("full", "full", "full"), kvrack.create_cache("dynamic", spec("full", "full", "full"))
    for each in (cache, twin):
        feed(each, (50, 1))
    (file,) = files(tmp_path)
    file.unlink()
    expect_alike(cache, twin, new=300)
    expect_alike(cache, twin)


def test_a_disk_that_cannot_be_read_is_named(on_disk, monkeypatch):
    cache = on_disk("full", "full", "full")
    feed(cache, (50, 1))
    before = state_of(cache.layers[2])

    def broken(*arguments):
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(kvrack.OffloadError, match=r"can't be read: .*Input/output error"):
            feed(cache, (1, 1))
    expect_state(cache.layers[2], before)


# --- nothing is left behind ---------------------------------------------------------------------


def test_the_file_goes_with_the_cache(on_disk, tmp_path):
    cache = on_disk("full", "full")
    assert files(tmp_path) == [], "building allocates nothing"
    feed(cache, (9, 1))
    twin = copy.deepcopy(cache)
    assert len(files(tmp_path)) == 2
    del cache
    gc.collect()
    assert len(files(tmp_path)) == 1
    expect_alike(twin, twin.fork())
    del twin
    gc.collect()
    assert files(tmp_path) == []


SCRIPT = """
import os, signal, sys, tempfile
import torch, kvrack
# A shell starts what it runs in the background with interrupts ignored, and Python leaves that so.
signal.signal(signal.SIGINT, signal.default_int_handler)
tempfile.tempdir = sys.argv[1]
cache = kvrack.create_cache("offload", kvrack.ModelSpec.uniform(3), tier="disk")
states = torch.randn(1, 2, 2000, 64)
for step in range(10_000):
    for index in range(3):
        cache.update(states if step == 0 else states[:, :, :1], states if step == 0 else states[:, :, :1], index)
    if step == 3:
        print(*os.listdir(sys.argv[1]), flush=True)
        if sys.argv[2] == "raise":
            raise RuntimeError("in the middle")
"""


@pytest.mark.parametrize("way", ["raise", "interrupt"])
def test_a_process_that_ends_in_the_middle_leaves_nothing(tmp_path, way):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), way], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert "kvrack-offload-" in process.stdout.readline()
    if way == "interrupt":
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0
    assert ("KeyboardInterrupt" if way == "interrupt" else "in the middle") in error
    # torch has a folder of its own among the temporary ones.
    assert [path for path in files(tmp_path) if path.name.startswith("kvrack")] == []


# --- config -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"tier": "tape"}, "tier: .*'host' or 'disk'"),
        ({"tier": "host", "folder": "/tmp"}, "folder is only read with tier='disk'"),
        ({"resident_layers": -1}, "resident_layers: .*greater than or equal to 0"),
        ({"banana": 1}, "unknown key 'banana'. Valid keys: .*inner"),
    ],
)
def test_config_is_refused_by_key(config, text):
    with pytest.raises(kvrack.InvalidConfig, match=text):
        kvrack.resolve("offload", config)


def test_what_is_held_is_resolved_when_a_cache_is_built():
    with pytest.raises(kvrack.UnknownBackend, match=r"'dynamik'.*Did you mean 'dynamic'"):
        kvrack.create_cache("offload", spec("full"), inner="dynamik")
    with pytest.raises(kvrack.InvalidConfig, match="config of cache backend 'dynamic': unknown key 'banana'"):
        kvrack.create_cache("offloaded", spec("full"), inner_config={"banana": 1})


def test_aliases_hold_what_they_are_named_for(tmp_path):
    place = {"tier": "disk", "folder": str(tmp_path)}
    cache = kvrack.create_cache("offloaded", spec("full"), inner_config={"growth": 2.0}, **place)
    assert cache.layers[0]._hold.inner.config.growth == 2.0
    if "static" in kvrack.backends():
        cache = kvrack.create_cache("offloaded_static", spec("full", "sliding"), max_cache_len=40, **place)
        assert cache.get_max_length() == 40
        feed(cache, (9,))
        assert {row.device for row in cache.memory() if row.layer == 1} == {"cpu"}


def test_within_another_the_outer_place_counts(tmp_path):
    cache = kvrack.create_cache(
        "offload", spec("full"), inner="offloaded", inner_config={"tier": "disk"}, tier="disk", folder=str(tmp_path)
    )
    feed(cache, (9, 1))
    assert len(files(tmp_path)) == 1
