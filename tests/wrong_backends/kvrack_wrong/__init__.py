"""Backends for the suite's own tests: good ones of several kinds, and wrong ones with one fault each."""

from __future__ import annotations

from kvrack import Backend, hookimpl

DYNAMIC = "kvrack_dynamic.layer:DynamicConfig"
CROSS = "kvrack_wrong.cross:CrossConfig"
MAMBA = "kvrack_wrong.states:StatesConfig"
PLAIN = "kvrack.config:BackendConfig"
INT8 = "kvrack_wrong.int8:Int8Config"

# name -> (layer, config)
BACKENDS: dict[str, tuple[str, str]] = {
    "good-plain": ("kvrack_wrong.good:PlainLayer", PLAIN),
    "good-static": ("kvrack_wrong.good:StaticLayer", PLAIN),
    "good-int8": ("kvrack_wrong.int8:Int8Layer", INT8),
    "good-holder": ("kvrack_wrong.good:hold", "kvrack_wrong.good:HolderConfig"),
    "good-states": ("kvrack_wrong.states:build", PLAIN),
    "wrong-loose-config": ("kvrack_wrong.good:PlainLayer", "kvrack_wrong.wrong_layers:LooseConfig"),
    "wrong-holder": ("kvrack_wrong.wrong_layers:hold_dynamic", "kvrack_wrong.good:HolderConfig"),
    "wrong-states-reorder": ("kvrack_wrong.states:build_half_reorder", PLAIN),
    "wrong-states-crop": ("kvrack_wrong.states:build_half_crop", PLAIN),
    "wrong-states-reset": ("kvrack_wrong.states:build_forgets_reset", PLAIN),
    "wrong-states-copies": ("kvrack_wrong.states:build_copies", MAMBA),
    "wrong-states-move": ("kvrack_wrong.states:build_moves", MAMBA),
    "wrong-states-halfway": ("kvrack_wrong.states:build_halfway", MAMBA),
    "wrong-states-short": ("kvrack_wrong.states:build_short", MAMBA),
    "wrong-cross-cropped": ("kvrack_wrong.cross:build_cropped", CROSS),
    "wrong-cross-mixes": ("kvrack_wrong.cross:build_mixes", CROSS),
    "wrong-cross-windowed": ("kvrack_wrong.cross:build_windowed", CROSS),
    "wrong-hybrid-reorder": ("kvrack_wrong.states:build_attention_only", MAMBA),
}
for _name, _layer, _config in (
    ("repeat-forgets", "wrong_layers:RepeatForgets", DYNAMIC),
    ("reorder-forgets-values", "wrong_layers:ReorderForgetsValues", DYNAMIC),
    ("index-half-done", "wrong_layers:SelectWritesBeforeItFails", DYNAMIC),
    ("length-tensor", "wrong_layers:LengthTensor", DYNAMIC),
    ("swallows-arguments", "wrong_layers:SwallowsArguments", DYNAMIC),
    ("reset-leaves-tail", "wrong_layers:ResetLeavesTail", DYNAMIC),
    ("window-too-long", "wrong_layers:WindowTooLong", DYNAMIC),
    ("mask-too-long", "wrong_layers:MaskTooLong", DYNAMIC),
    ("mask-forgets-offset", "wrong_layers:MaskForgetsOffset", DYNAMIC),
    ("copy-shares", "wrong_layers:CopyShares", DYNAMIC),
    ("fork-writes-through", "wrong_layers:ForkWritesThrough", DYNAMIC),
    ("save-forgets", "wrong_layers:MetadataForgets", DYNAMIC),
    ("crop-below-zero", "wrong_layers:CropBelowZero", DYNAMIC),
    ("crop-half-done", "wrong_layers:CropHalfDone", DYNAMIC),
    ("crop-counts-wrongly", "wrong_layers:CropCountsWrongly", DYNAMIC),
    ("crop-raises", "wrong_layers:CropRaises", DYNAMIC),
    ("crop-takes-positive", "wrong_layers:CropTakesPositive", DYNAMIC),
    ("recording-forgets", "wrong_layers:RecordingForgets", DYNAMIC),
    ("early-init-dtype", "wrong_layers:EarlyInitDtype", DYNAMIC),
    ("offload-forgets", "wrong_layers:OffloadForgets", DYNAMIC),
    ("aliases", "wrong_layers:Aliases", PLAIN),
    ("keeps-grad", "wrong_layers:KeepsGrad", PLAIN),
    ("newest-first", "wrong_layers:NewestFirst", PLAIN),
    ("casts-dtype", "wrong_layers:CastsDtype", PLAIN),
    ("returns-float", "wrong_layers:ReturnsFloat", PLAIN),
    ("refuses-in-silence", "wrong_layers:RefusesInSilence", PLAIN),
    ("heads-of-its-spec", "wrong_layers:HeadsOfItsSpec", PLAIN),
    ("indices-stay-behind", "wrong_layers:IndicesStayBehind", PLAIN),
    ("refuses-without-name", "wrong_layers:RefusesWithoutName", PLAIN),
    ("changes-its-promise", "wrong_layers:ChangesItsPromise", PLAIN),
    ("scratch-is-shared", "wrong_layers:ScratchIsShared", PLAIN),
    ("moves-address", "wrong_layers:MovesAddress", DYNAMIC),
    ("breaks-graph", "wrong_layers:BreaksGraph", DYNAMIC),
    ("initialized-too-soon", "wrong_layers:InitializedTooSoon", DYNAMIC),
    ("hides-memory", "wrong_layers:HidesMemory", DYNAMIC),
    ("predicts-too-little", "wrong_layers:PredictsTooLittle", DYNAMIC),
    ("capacity-in-silence", "wrong_layers:CapacityInSilence", PLAIN),
    ("select-cuts-tail-only", "wrong_codecs:SelectCutsTailOnly", INT8),
    ("reorder-forgets-scales", "wrong_codecs:ReorderForgetsScales", INT8),
    ("bound-understated", "wrong_codecs:BoundUnderstated", INT8),
    ("says-lossless", "wrong_codecs:SaysLossless", INT8),
    ("clips-later", "wrong_codecs:ClipsLater", INT8),
    ("encodes-again", "wrong_codecs:EncodesAgain", INT8),
    ("nan-from-zeros", "wrong_codecs:NanFromZeros", INT8),
    ("tail-too-short", "wrong_codecs:TailTooShort", INT8),
    ("scale-over-batch", "wrong_codecs:ScaleOverBatch", INT8),
    ("too-few-sinks", "wrong_codecs:build_too_few_sinks", "kvrack_wrong.wrong_codecs:SinksConfig"),
):
    BACKENDS[f"wrong-{_name}"] = (f"kvrack_wrong.{_layer}", _config)

# name -> codec, with kvrack_wrong.codecs:StaticCodecConfig
CODECS = {
    "good-token-codec": "kvrack_wrong.codecs:TokenCodec",
    "good-block-codec": "kvrack_wrong.codecs:BlockCodec",
}


@hookimpl
def kvrack_backend(name: str) -> Backend:
    """Return the backend of this name."""
    if name in CODECS:
        config = "kvrack_wrong.codecs:StaticCodecConfig"
        return Backend(name=name, summary="for the suite's own tests", codec=CODECS[name], config=config)
    layer, config = BACKENDS[name]
    return Backend(
        name=name,
        summary="for the suite's own tests",
        layer=layer,
        config=config,
        states="states:" in layer,
        cross_attention="cross:" in layer,
    )
