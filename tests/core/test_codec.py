"""EncodedBuffer, EncodedLayer and Backend(codec=...), with the codecs of a fake installed plugin."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrack import (
    Backend,
    BackendConfig,
    BuildContext,
    Cache,
    Capabilities,
    InvalidPlugin,
    LayerSpec,
    ModelSpec,
    Placement,
    ShapeMismatch,
    UnsupportedOperation,
    create_cache,
    load,
    registry,
)
from kvrack.codec import Codec, EncodedBuffer
from kvrack.encoded import EncodedLayer
from kvrack.scratch import Scratch

PLUGIN = Path(__file__).parent / "codec_plugin"
BLOCK = 32
FULL = LayerSpec()
WINDOWED = [LayerSpec("sliding", window=6), LayerSpec("sliding", window=70), LayerSpec("chunked", window=33)]


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[None]:
    sys.path.insert(0, str(PLUGIN))
    registry.refresh()
    yield
    sys.path.remove(str(PLUGIN))
    registry.refresh()


def states(tokens: int, batch: int = 2, heads: int = 3, dim: int = 16, seed: int = 0, scale: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(seed + 1000 * tokens)
    return torch.randn(batch, heads, tokens, dim, generator=generator) * scale


def build(name: str, spec: LayerSpec = FULL, **config: Any) -> EncodedLayer:
    layer = create_cache(name, ModelSpec.uniform(1, spec), **config).layers[0]
    assert isinstance(layer, EncodedLayer)
    return layer


def feed(layer: EncodedLayer, *counts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Update with so many tokens at a time; return what was given, concatenated."""
    keys, values = [], []
    for step, count in enumerate(counts):
        keys.append(states(count, seed=seed + 2 * step))
        values.append(states(count, seed=seed + 2 * step + 1))
        layer.update(keys[-1], values[-1])
    return torch.cat(keys, 2), torch.cat(values, 2)


class TestPlugin:
    def test_the_design_example_needs_only_encode_and_decode(self) -> None:
        layer = build("test-int8")
        keys, _ = feed(layer, 5, 1, 1)
        assert layer.keys is not None
        assert layer.keys.shape == keys.shape
        assert (layer.keys - keys).abs().amax() <= keys.abs().amax() / 127

    def test_layer_and_codec_exclude_each_other(self) -> None:
        with pytest.raises(InvalidPlugin, match="exactly one of layer= and codec=, got neither"):
            Backend(name="x", summary="")
        with pytest.raises(InvalidPlugin, match="exactly one of layer= and codec=, got both"):
            Backend(name="x", summary="", layer="a:b", codec="a:b")

    def test_what_is_no_codec_is_refused(self) -> None:
        backend = Backend(name="x", summary="", codec="kvrack.layer:EmptyLayer")
        with pytest.raises(InvalidPlugin, match=r"subclass of kvrack\.codec\.Codec"):
            backend.build_layer(FULL, BackendConfig(), BuildContext())

    def test_a_constructor_that_swallows_arguments_is_refused(self) -> None:
        backend = Backend(name="x", summary="", codec=f"{__name__}:SwallowingCodec")
        with pytest.raises(InvalidPlugin, match=r"constructor swallows arguments \(\*\*kwargs"):
            backend.build_layer(FULL, BackendConfig(), BuildContext())

    def test_capabilities_come_from_the_codec(self) -> None:
        assert build("test-int8").capabilities.relative_error == 1.0
        capabilities = build("test-int4").capabilities
        assert (capabilities.relative_error, capabilities.lossless) == (0.07, False)

    def test_a_layer_without_a_codec_says_how_to_name_one(self) -> None:
        with pytest.raises(InvalidPlugin, match=r"Backend\(codec=\.\.\.\)"):
            EncodedLayer(FULL, BackendConfig(), BuildContext(backend="x"))


class TestValues:
    def test_the_update_that_brings_tokens_returns_them_exact(self) -> None:
        layer = build("test-int4")
        for step, count in enumerate((40, 1, 33, 64, 2)):
            key, value = states(count, seed=step), states(count, seed=step + 50)
            returned_keys, returned_values = layer.update(key, value)
            assert torch.equal(returned_keys[:, :, -count:], key)
            assert torch.equal(returned_values[:, :, -count:], value)

    @pytest.mark.parametrize("counts", [(100,), (40, 1, 1, 1), (1,) * 80, (31, 1, 8, 1)])
    def test_the_newest_residual_tokens_stay_exact(self, counts: tuple[int, ...]) -> None:
        layer = build("test-int4", residual_length=8)
        keys, values = feed(layer, *counts)
        assert layer.keys is not None
        assert layer.values is not None
        assert torch.equal(layer.keys[:, :, -8:], keys[:, :, -8:])
        assert torch.equal(layer.values[:, :, -8:], values[:, :, -8:])

    def test_codes_never_change_once_written(self) -> None:
        layer = build("test-int4")
        seen: dict[str, torch.Tensor] = {}
        for step in range(120):
            layer.update(states(3, seed=step, scale=1.0 + step), states(3, seed=-step))
            for name, tensor in layer.storage().items():
                if not name.endswith(".tail"):
                    before = seen.get(name)
                    if before is not None:
                        assert torch.equal(tensor[:, :, : before.shape[2]], before), name
                    seen[name] = tensor.clone()
        assert set(seen) == {f"{role}.{part}" for role in ("keys", "values") for part in ("codes", "low", "step")}
        assert seen["keys.low"].shape[2] == seen["keys.codes"].shape[2] // BLOCK == (360 - 8) // BLOCK

    def test_codes_depend_on_the_token_alone_and_not_on_how_it_came(self) -> None:
        at_once, one_by_one = build("test-int4"), build("test-int4")
        key, value = states(75), states(75, seed=9)
        at_once.update(key, value)
        for token in range(75):
            one_by_one.update(key[:, :, token : token + 1], value[:, :, token : token + 1])
        assert at_once.metadata() == one_by_one.metadata()
        for name, tensor in at_once.storage().items():
            assert torch.equal(tensor, one_by_one.storage()[name]), name

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_dtype_out_is_dtype_in(self, dtype: torch.dtype) -> None:
        layer = build("test-int4")
        for count in (40, 1):
            keys, values = layer.update(states(count).to(dtype), states(count, dim=8).to(dtype))
            assert keys.dtype == values.dtype == dtype
        assert layer.keys is not None
        assert layer.keys.dtype == dtype

    @pytest.mark.parametrize("value", [0.0, 3.0])
    def test_zeros_and_constants_come_back(self, value: float) -> None:
        layer = build("test-int4", residual_length=0)
        layer.update(torch.full((1, 2, 64, 16), value), torch.full((1, 2, 64, 16), value))
        assert layer.keys is not None
        assert torch.equal(layer.keys, torch.full((1, 2, 64, 16), value))

    def test_gradient_flows_through_new_tokens_and_survives_other_layers(self) -> None:
        cache = create_cache("test-int8", ModelSpec.uniform(2))
        total = torch.zeros(())
        fresh = []
        for layer in range(2):
            cache.update(states(4), states(4), layer)
        for layer in range(2):
            fresh.append(states(2, seed=layer).requires_grad_())
            keys, values = cache.update(fresh[-1], fresh[-1], layer)
            total = total + (keys**2).sum() + values.sum()
        total.backward()
        for new in fresh:
            assert new.grad is not None
            torch.testing.assert_close(new.grad, 2 * new.detach() + 1)

    def test_inference_mode_then_no_grad(self) -> None:
        layer = build("test-int4")
        with torch.inference_mode():
            layer.update(states(70), states(70))
            layer.update(states(1), states(1))
        with torch.no_grad():
            layer.update(states(40), states(40))
        assert layer.get_seq_length() == 111


class TestCrop:
    @pytest.mark.parametrize("removed", [1, 8, 12, 39, 40, 64, 99])
    def test_what_is_left_reads_as_before_and_goes_on(self, removed: int) -> None:
        layer = build("test-int4")
        feed(layer, 100)
        assert layer.keys is not None
        before = layer.keys.clone()
        layer.crop(-removed)
        assert layer.get_seq_length() == 100 - removed
        assert torch.equal(layer.keys, before[:, :, : 100 - removed])
        keys, _ = layer.update(states(50), states(50))
        assert keys.shape[2] == 150 - removed

    def test_a_cut_block_is_decoded_once_into_the_tail(self) -> None:
        layer = build("test-int4", residual_length=0)
        feed(layer, 70)
        codes = layer.storage()["keys.codes"].clone()
        layer.crop(-10)
        assert layer.storage()["keys.codes"].shape[2] == 32
        assert torch.equal(layer.storage()["keys.codes"], codes[:, :, :32])
        assert layer.storage()["keys.tail"].shape[2] == 28
        assert layer.storage()["values.tail"].shape[2] == 0

    def test_more_than_there_is_empties(self) -> None:
        layer = build("test-int4")
        feed(layer, 50)
        layer.crop(-51)
        assert layer.get_seq_length() == 0
        key = states(3)
        assert torch.equal(layer.update(key, key)[0], key)


class TestWindows:
    @pytest.mark.parametrize("spec", WINDOWED, ids=str)
    @pytest.mark.parametrize("name", ["test-int8", "test-int4"])
    def test_whole_blocks_leave_and_memory_is_bounded(self, name: str, spec: LayerSpec) -> None:
        layer = build(name, spec)
        given = states(0)
        sizes = []
        for step, count in enumerate([7, 1, 50, 1, 1, 200, *[1] * 300]):
            new = states(count, seed=step)
            given = torch.cat([given, new], 2)
            length, offset = layer.get_mask_sizes(count)
            keys, values = layer.update(new, new)
            expected = given[:, :, offset:]
            assert keys.shape == values.shape == expected.shape
            assert length == expected.shape[2]
            assert (keys - expected).abs().amax() < 0.5
            assert torch.equal(keys[:, :, -count:], new)
            sizes.append(layer.nbytes)
        assert spec.window is not None
        held = [tensor.shape[2] for key, tensor in layer.storage().items() if key == "keys.codes"]
        assert sum(held) <= spec.window + BLOCK
        assert max(sizes[-100:]) == min(sizes[-100:])

    def test_a_window_is_not_copied_at_every_token(self) -> None:
        placement = CountingPlacement()
        layer = make("test-int8", LayerSpec("sliding", window=200), placement=placement)
        feed(layer, 300, *[1] * 50)
        before = placement.count
        feed(layer, *[1] * 500)
        assert placement.count == before

    def test_crop_goes_back_past_the_window_when_recorded(self) -> None:
        layer = build("test-int4", WINDOWED[0])
        feed(layer, 20)
        with pytest.raises(UnsupportedOperation, match="records_past"):
            layer.crop(-2)
        layer.activate_past_recording()
        keys, _ = feed(layer, 60, seed=7)
        layer.crop(-30)
        assert layer.get_seq_length() == 50
        assert layer.get_mask_sizes(1) == (6, 45)
        new = states(1)
        returned, _ = layer.update(new, new)
        assert (returned[:, :, :5] - keys[:, :, 25:30]).abs().amax() < 0.5
        layer.crop(0)
        assert sum(tensor.shape[2] for name, tensor in layer.storage().items() if name == "keys.codes") <= BLOCK

    def test_a_long_prompt_is_not_encoded_where_no_query_will_see_it(self) -> None:
        layer = make("test-int8", LayerSpec("sliding", window=10))
        feed(layer, 500)
        assert layer.storage()["keys.codes"].shape[2] == 9
        assert layer.storage()["keys.codes"].untyped_storage().nbytes() < 500 * 2 * 3 * 16


class TestSinks:
    @pytest.mark.parametrize("counts", [(300,), (3, 1, 1, 40, 200), (1,) * 150])
    def test_the_first_tokens_stay_exact_and_blocks_are_counted_after_them(self, counts: tuple[int, ...]) -> None:
        layer = build("test-int4", sink_tokens=5)
        keys, values = feed(layer, *counts)
        assert layer.keys is not None
        assert layer.values is not None
        assert torch.equal(layer.keys[:, :, :5], keys[:, :, :5])
        assert torch.equal(layer.values[:, :, :5], values[:, :, :5])
        assert not torch.equal(layer.keys[:, :, 5:], keys[:, :, 5:])
        without = build("test-int4", sink_tokens=0)
        without.update(keys[:, :, 5:], values[:, :, 5:])
        assert without.keys is not None
        assert torch.equal(layer.keys[:, :, 5:], without.keys)
        assert layer.storage()["keys.codes"].shape[2] == without.storage()["keys.codes"].shape[2]

    @pytest.mark.parametrize("left", [60, 37, 5, 3, 0])
    def test_a_crop_into_them_leaves_what_fewer_tokens_would_have(self, left: int) -> None:
        layer, fewer = build("test-int4", sink_tokens=5), build("test-int4", sink_tokens=5)
        keys, values = states(60), states(60, seed=1)
        layer.update(keys, values)
        layer.crop(left - 60)
        if left:
            fewer.update(keys[:, :, :left], values[:, :, :left])
        assert layer.get_seq_length() == left
        new = states(50)
        layer.update(new, new)
        fewer.update(new, new)
        assert layer.keys is not None
        assert fewer.keys is not None
        assert layer.keys.shape == fewer.keys.shape
        given = torch.cat([keys[:, :, :left], new], 2)
        assert torch.equal(layer.keys[:, :, :5], given[:, :, :5])
        assert torch.equal(layer.keys[:, :, -8:], given[:, :, -8:])
        assert layer.metadata()["keys.to_sink"] == fewer.metadata()["keys.to_sink"] == 0

    @pytest.mark.parametrize("spec", WINDOWED, ids=str)
    def test_a_window_leaves_them_behind(self, spec: LayerSpec) -> None:
        layer, plain = build("test-int4", spec, sink_tokens=40), build("test-int4", spec)
        for step, count in enumerate([7, 1, 50, 1, 200, 1]):
            new = states(count, seed=step)
            keys, _ = layer.update(new, new)
            expected, _ = plain.update(new, new)
            assert keys.shape == expected.shape
            assert torch.equal(keys[:, :, -count:], new)
        assert "keys.sinks" not in layer.storage()
        assert (keys - expected).abs().amax() < 0.5

    def test_their_memory_is_theirs_alone(self) -> None:
        layer = build("test-int4", sink_tokens=5)
        feed(layer, 3)
        assert layer.storage()["keys.sinks"].shape == (2, 3, 3, 16)
        feed(layer, 100)
        assert layer.storage()["keys.sinks"].untyped_storage().nbytes() == 2 * 3 * 5 * 16 * 4
        assert "keys.sinks" not in build("test-int4").storage()

    def test_rows_and_snapshots_bring_them(self, tmp_path: Path) -> None:
        cache = create_cache("test-int4", ModelSpec.uniform(1), sink_tokens=5)
        layer = cache.layers[0]
        assert isinstance(layer, EncodedLayer)
        for count in (3, 60):
            feed(layer, count)
            assert layer.keys is not None
            rows = layer.keys[[1, 1, 0]].clone()
            changed = cache.fork()
            changed.reorder_cache(torch.tensor([1, 1, 0]))
            changed.save(tmp_path / "cache.safetensors")
            loaded = load(tmp_path / "cache.safetensors").layers[0]
            assert isinstance(loaded, EncodedLayer)
            assert loaded.keys is not None
            assert torch.equal(loaded.keys, rows)
            assert loaded.metadata() == layer.metadata()


class TestWholeLayer:
    @pytest.mark.parametrize("counts", [(5,), (40, 3), (100,)])
    @pytest.mark.parametrize("spec", [FULL, WINDOWED[1]], ids=str)
    def test_batch_operations_follow_every_tensor(self, spec: LayerSpec, counts: tuple[int, ...]) -> None:
        rows = torch.tensor([1, 1, 0])
        for change in (
            lambda layer: layer.reorder_cache(rows),
            lambda layer: layer.batch_select_indices(rows),
            lambda layer: (layer.batch_repeat_interleave(2), layer.batch_select_indices(torch.tensor([2, 3, 0]))),
        ):
            layer = build("test-int4", spec)
            feed(layer, *counts)
            assert layer.keys is not None
            keys = layer.keys.clone()
            change(layer)
            assert torch.equal(layer.keys, keys[rows])
            assert all(tensor.shape[0] == 3 for tensor in layer.storage().values())

    @pytest.mark.parametrize("counts", [(5,), (40, 3), (100,), (32,)])
    @pytest.mark.parametrize("spec", [FULL, *WINDOWED], ids=str)
    def test_save_and_load_keep_a_half_filled_tail(self, tmp_path: Path, spec: LayerSpec, counts: Any) -> None:
        cache = create_cache("test-int4", ModelSpec.uniform(2, spec), residual_length=3)
        for index in range(2):
            feed(cache.layers[index], *counts, seed=index)  # type: ignore[arg-type]
        cache.save(tmp_path / "cache.safetensors")
        loaded = load(tmp_path / "cache.safetensors")
        for copied in (loaded, cache.fork(), copy.deepcopy(loaded)):
            for mine, theirs in zip(cache.layers, copied.layers, strict=True):
                assert mine.metadata() == theirs.metadata()
                assert mine.storage().keys() == theirs.storage().keys()
                for name, tensor in mine.storage().items():
                    assert torch.equal(tensor, theirs.storage()[name])
        new = states(4)
        reference = [cache.update(new, new, index)[0].clone() for index in range(2)]
        for index in range(2):
            assert torch.equal(loaded.update(new, new, index)[0], reference[index])

    def test_a_block_that_left_a_window_is_no_loss_to_a_snapshot(self, tmp_path: Path) -> None:
        cache = create_cache("test-int4", ModelSpec.uniform(1, WINDOWED[0]), residual_length=0)
        layer = cache.layers[0]
        assert isinstance(layer, EncodedLayer)
        feed(layer, 33, *[1] * 5)
        assert layer.storage()["keys.codes"].shape[2] == 0
        cache.save(tmp_path / "cache.safetensors")
        assert load(tmp_path / "cache.safetensors").layers[0].metadata() == layer.metadata()

    def test_reset_then_another_shape(self) -> None:
        layer = build("test-int4")
        feed(layer, 90)
        layer.reset()
        assert layer.get_seq_length() == 0
        assert layer.nbytes == 0
        key = torch.randn(1, 1, 40, 8, dtype=torch.float64)
        layer.update(key, key[..., :4])
        assert layer.get_mask_sizes(1) == (41, 0)

    def test_other_shapes_are_refused_before_anything_is_written(self) -> None:
        layer = build("test-int4")
        feed(layer, 40)
        before = {name: tensor.clone() for name, tensor in layer.storage().items()}
        for wrong in (states(2, batch=1), states(2, heads=1), states(2, dim=8), states(2).double()):
            with pytest.raises(ShapeMismatch):
                layer.update(wrong, wrong)
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.storage().items())

    def test_early_initialization_holds_no_token(self) -> None:
        layer = build("test-int4")
        layer.early_initialization(2, 3, 16, 16, torch.float32, torch.device("cpu"))
        assert layer.is_initialized
        assert layer.get_seq_length() == 0
        feed(layer, 40)

    @settings(max_examples=60, deadline=None)
    @given(
        name=st.sampled_from(["test-int8", "test-int4"]),
        spec=st.sampled_from([FULL, *WINDOWED]),
        residual=st.integers(0, 40),
        sinks=st.sampled_from([0, 5, 40]),
        steps=st.lists(
            st.one_of(
                st.tuples(st.just("update"), st.integers(1, 70)),
                st.tuples(st.just("crop"), st.integers(1, 60)),
                st.tuples(st.just("copy"), st.just(0)),
                st.tuples(st.just("record"), st.just(0)),
            ),
            max_size=14,
        ),
    )
    def test_random_use_stays_near_concatenation(
        self, name: str, spec: LayerSpec, residual: int, sinks: int, steps: Any
    ) -> None:
        config = {"residual_length": residual, "sink_tokens": sinks} if name == "test-int4" else {}
        layer = build(name, spec, **config)
        given_keys = states(0)
        cuts = 0
        for step, (action, count) in enumerate(steps):
            if action == "update":
                new = states(count, seed=step)
                given_keys = torch.cat([given_keys, new], 2)
                length, offset = layer.get_mask_sizes(count)
                keys, values = layer.update(new, new)
                expected = given_keys[:, :, offset:]
                assert keys.shape == values.shape == expected.shape
                assert length == expected.shape[2]
                # 0.07 of the largest magnitude a normal sample of this size has, once more for each cut.
                assert (keys - expected).abs().amax() <= 0.07 * 5 * (1 + cuts)
                assert (values - expected).abs().amax() <= 0.07 * 5 * (1 + cuts)
            elif action == "crop":
                try:
                    layer.check_crop(-count)
                except UnsupportedOperation:
                    continue
                layer.crop(-count)
                cuts += 1
                given_keys = given_keys[:, :, : max(0, given_keys.shape[2] - count)]
            elif action == "copy":
                layer = copy.deepcopy(layer)
            else:
                layer.activate_past_recording()
            assert layer.get_seq_length() == given_keys.shape[2]
            if spec.window is None and config and layer.keys is not None:
                assert torch.equal(layer.keys[:, :, :sinks], given_keys[:, :, :sinks])


class TestScratch:
    def test_layers_share_one_and_memory_tells_it(self) -> None:
        cache = create_cache("test-int8", ModelSpec.uniform(4))
        for count in (100, 1):
            for layer in range(4):
                cache.update(states(count), states(count), layer)
        scratch = [row for row in cache.memory() if row.role == "scratch"]
        assert [row.layer for row in scratch] == [0, 0]
        assert sum(row.nbytes for row in scratch) <= 2 * 101 * 2 * 3 * 16 * 4 * 1.26
        assert cache.nbytes == sum(layer.nbytes for layer in cache) + sum(row.nbytes for row in scratch)
        cache.reset()
        assert cache.nbytes == 0

    def test_a_layer_that_others_read_keeps_its_own(self) -> None:
        spec = ModelSpec(layers=(LayerSpec(read_by_others=True), FULL, LayerSpec(read_by_others=True)))
        cache = create_cache("test-int8", spec)
        for index in range(3):
            cache.update(states(20, seed=index), states(20), index)
        returned = [cache.update(states(1, seed=index), states(1), index)[0] for index in range(3)]
        kept = [tensor.clone() for tensor in returned]
        cache.update(states(1, seed=8), states(1), 1)
        assert torch.equal(returned[0], kept[0])
        assert torch.equal(returned[2], kept[2])
        assert not torch.equal(returned[0][:, :, :20], returned[2][:, :, :20])

    def test_a_fork_decodes_into_its_own(self) -> None:
        cache = create_cache("test-int8", ModelSpec.uniform(2))
        for index in range(2):
            cache.update(states(20), states(20), index)
        fork = cache.fork()
        returned, _ = cache.update(states(1), states(1), 0)
        kept = returned.clone()
        fork.update(states(1, seed=3), states(1), 0)
        fork.update(states(1, seed=4), states(1), 1)
        assert torch.equal(returned, kept)
        assert sum(row.role == "scratch" for row in fork.memory()) == 2

    def test_blocks_stay_shared_by_the_branch_that_goes_on_first(self) -> None:
        cache = create_cache("test-int4", ModelSpec.uniform(1), residual_length=3)
        feed(cache.layers[0], 200)  # type: ignore[arg-type]
        fork, other = cache.fork(), cache.fork()

        def codes(each: Any) -> dict[str, int]:
            found = each.layers[0].storage()
            return {
                name: tensor.data_ptr()
                for name, tensor in found.items()
                if name.startswith("keys") and "tail" not in name
            }

        assert codes(fork) == codes(cache) == codes(other)
        for branch in (fork, other):
            branch.update(states(1), states(1), 0)
        assert codes(fork) == codes(cache) == codes(other), "no block was complete"
        for branch in (fork, other):
            branch.update(states(BLOCK), states(BLOCK), 0)
        assert codes(fork) == codes(cache)
        assert codes(other) != codes(cache)

    def test_it_is_used_again_and_grows_geometrically(self) -> None:
        scratch = Scratch()
        pointers = {
            scratch.take("keys", (1, 1, tokens, 4), torch.float32, torch.device("cpu")).data_ptr()
            for tokens in range(1, 1000)
        }
        assert len(pointers) < 40

    @pytest.mark.parametrize("layout", ["dynamic", "static"])
    @pytest.mark.parametrize("spec", [FULL, LayerSpec(attention="sliding", window=60)], ids=["full", "sliding"])
    def test_no_room_is_made_for_more_than_will_come(self, layout: str, spec: LayerSpec) -> None:
        cache = create_cache("test-int8", ModelSpec(layers=(spec,)), max_length=400, layout=layout)
        most = 0
        for count in (100, 200, *[1] * 100):
            keys, values = cache.update(states(count), states(count), 0)
            most = max(most, keys.shape[2])
        scratch = sum(row.nbytes for row in cache.memory() if row.role == "scratch")
        assert keys.shape[2] == (spec.window or 400)
        assert scratch <= most * (keys.nbytes + values.nbytes) // keys.shape[2]


class TestBrokenCodecs:
    @pytest.mark.parametrize(
        ("encode", "text"),
        [
            (lambda states: {"codes": states[0]}, r"expected \[batch, heads, blocks \* rows, columns\]"),
            (lambda states: {"tail": states}, "not named 'tail'"),
            (lambda states: {"sinks": states}, "not named 'tail' or 'sinks'"),
            (lambda states: {"codes": states[:1]}, r"expected \[batch"),
            (lambda states: {}, "rows per block"),
        ],
    )
    def test_what_encode_returns_is_checked_before_anything_is_written(self, encode: Callable[..., Any], text: str):
        layer = make("test-int8")
        codec = layer._codecs[0]
        codec.encode = encode  # type: ignore[method-assign]
        with pytest.raises(InvalidPlugin, match=text):
            layer.update(states(3), states(3))
        assert layer.get_seq_length() == 0
        assert not layer.is_initialized

    def test_a_codec_that_changes_its_mind_is_refused(self) -> None:
        layer = make("test-int8")
        feed(layer, 3)
        codec = layer._codecs[0]
        codec.encode = lambda states: {"codes": states}  # type: ignore[method-assign]
        with pytest.raises(InvalidPlugin, match="before, they were"):
            layer.update(states(3), states(3))

    def test_a_block_of_no_token_is_refused(self) -> None:
        with pytest.raises(InvalidPlugin, match="block_tokens is 0"):
            EncodedBuffer(EmptyBlocks(BackendConfig(), "keys"), lambda rows: BuildContext().buffer(), Scratch(), "keys")

    def test_a_lossless_codec_promises_so(self) -> None:
        layer = EncodedLayer(FULL, BackendConfig(), BuildContext(codec=Verbatim))
        assert layer.capabilities == replace(layer.capabilities, lossless=True, relative_error=0.0)
        assert isinstance(layer.capabilities, Capabilities)
        keys, _ = feed(layer, 50, 1)
        assert layer.keys is not None
        assert torch.equal(layer.keys, keys)


class CountingPlacement(Placement):
    def __init__(self) -> None:
        self.count = 0

    def allocate(self, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.count += 1
        return super().allocate(shape, dtype, device)


def make(name: str, spec: LayerSpec = FULL, **context: Any) -> EncodedLayer:
    """Build one layer with a context of the test's own."""
    resolved = registry.resolve(name)
    layer = resolved.backend.build_layer(spec, resolved.config, BuildContext(backend=name, **context))
    assert isinstance(layer, EncodedLayer)
    return layer


class Verbatim(Codec):
    block_tokens = 4
    relative_error = 0.0

    def encode(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"codes": states}

    def decode(self, encoded: dict[str, torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(encoded["codes"])


class EmptyBlocks(Verbatim):
    block_tokens = 0


class SwallowingCodec(Verbatim):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


def test_a_whole_cache_is_one_cache() -> None:
    cache = create_cache("test-int4", ModelSpec(layers=(FULL, WINDOWED[0])), residual_length=1)
    assert isinstance(cache, Cache)
    for index in range(2):
        cache.update(states(50), states(50), index)
    cache.crop(0)
    assert cache.get_seq_length() == 50
