"""GGUF files become Hugging Face folders: the same weights, the same logits, the same tokens."""

import json
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_gguf import TinyModel, byte_vocabulary, write_gguf

from kvanta import InputError, ResourceError
from kvanta.checkpoint.resolve import resolve_model
from kvanta.gguf.convert import convert_gguf

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def read_bf16(folder: Path) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}


MODELS = [
    TinyModel(),
    TinyModel(tied=True, seed=1),
    TinyModel(heads=4, kv_heads=4, head_dim=8, seed=2),
    TinyModel(architecture="qwen2", seed=3),
    TinyModel(architecture="qwen3", seed=4, extra={"attention.key_length": 16}),
    TinyModel(seed=5, extra={"attention.sliding_window": 32}),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.architecture}-{model.seed}")
def test_weights_come_back_bit_for_bit(model: TinyModel, tmp_path: Path) -> None:
    weights = model.weights()
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", model, weights), tmp_path / "out")
    found = read_bf16(folder)
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.architecture}-{model.seed}")
def test_transformers_gives_the_logits_of_the_source(model: TinyModel, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    weights = model.weights()
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", model, weights), tmp_path / "out")
    converted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    # The source, built without a config.json: from the sizes alone.
    classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    family = "Mistral" if "attention.sliding_window" in model.extra else classes[model.architecture]
    config = getattr(transformers, family + "Config")(
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab,
        rms_norm_eps=1e-5,
        tie_word_embeddings=model.tied,
        **({"sliding_window": 32} if family == "Mistral" else {}),
    )
    source = getattr(transformers, family + "ForCausalLM")(config)
    state = {name: torch.from_numpy(values) for name, values in weights.items()}
    missing, unexpected = source.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    tokens = torch.arange(60).reshape(1, -1) * 5 % model.vocab
    with torch.no_grad():
        torch.testing.assert_close(converted(tokens).logits, source.eval()(tokens).logits)


def test_quantized_tensors_are_dequantized(tmp_path: Path) -> None:
    model = TinyModel(head_dim=32)
    weights = model.weights()
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", model, weights, kind=Q8_0), tmp_path / "out")
    found = read_bf16(folder)
    assert found.keys() == weights.keys()
    shares = []
    for name, values in found.items():
        # q8_0: half a step of amax / 127 per 32 values; bf16: half a unit in the last of 8 bits.
        shares.append(np.abs(values - weights[name]).max() / np.abs(weights[name]).max())
        assert shares[-1] <= 0.5 / 127 + 2.0**-8, name
    assert max(shares) > 2.0**-8, "no more than bf16 rounds"


def test_an_output_stored_twice_is_tied(tmp_path: Path) -> None:
    model = TinyModel()
    weights = model.weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", model, weights), tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in read_bf16(folder)


def test_the_configuration(tmp_path: Path) -> None:
    model = TinyModel(extra={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", model, model.weights()), tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["max_position_embeddings"] == 256
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config["torch_dtype"] == "bfloat16"
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": [2]}


def test_llama3_rope_factors_become_parameters(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = TinyModel(head_dim=64, heads=2, kv_heads=1)
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=64, rope_parameters={**scaling, "rope_theta": 10000.0}
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    weights = model.weights()
    path = write_gguf(tmp_path / "m.gguf", model, weights)
    # llama.cpp stores the quotient of the frequencies as a separate tensor.
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(tmp_path / "r.gguf", "llama")
    for name, value in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            contents, kind = value.contents(), value.types[0]
            sub = value.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, contents, kind, sub_type=sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = convert_gguf(tmp_path / "r.gguf", tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == scaling


def test_the_converted_folder_loads_as_a_tokenizer(tmp_path: Path) -> None:
    from kvanta.text.tokenizer import Tokenizer

    model = TinyModel()
    tokenizer = Tokenizer(convert_gguf(write_gguf(tmp_path / "m.gguf", model, model.weights()), tmp_path / "out"))
    tokens, _, _ = byte_vocabulary(model.vocab)
    ids = tokenizer.encode("AB é")
    assert [tokens[token] for token in ids] == ["<s>", "\u2581", "A", "B", "\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "AB é"
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


# --- the folder


def test_a_file_is_described_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))
    model = TinyModel()
    path = write_gguf(tmp_path / "m.gguf", model, model.weights())
    folder = resolve_model(path).path
    before = (folder / "config.json").stat().st_mtime_ns
    assert resolve_model(str(path)).path == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    assert sorted(entry.name for entry in folder.parent.iterdir()) == [folder.name]  # no work folders are left


def test_two_conversions_at_once_make_one_folder(tmp_path: Path) -> None:
    model = TinyModel()
    path = write_gguf(tmp_path / "m.gguf", model, model.weights())
    errors: list[Exception] = []

    def convert() -> None:
        try:
            convert_gguf(path, tmp_path / "out")
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=convert) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (tmp_path / "out" / "config.json").is_file()
    assert all(isinstance(error, InputError) and "exists already" in str(error) for error in errors)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_a_folder_in_use_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    model = TinyModel()
    path = write_gguf(tmp_path / "m.gguf", model, model.weights())
    with pytest.raises(InputError, match="exists already"):
        convert_gguf(path, tmp_path / "out")
    assert (tmp_path / "out" / "precious").read_text() == "x"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    model = TinyModel()
    path = write_gguf(tmp_path / "m.gguf", model, model.weights())
    with pytest.raises(ResourceError, match="cannot write"):
        convert_gguf(path, "/proc/nowhere/out")
