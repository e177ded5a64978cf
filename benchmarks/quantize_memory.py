"""Does quantizing need memory for the model, or for a block? Peak memory against the blocks.

Models of one shape with more and more blocks are made on the spot, of random weights, a shard a
block, and quantized in processes of their own. The peaks of a run that streams do not grow, neither
with the model nor from its first block to its last.

    python benchmarks/quantize_memory.py                       # 7B-shaped: 2, 4 and 8 of 32 blocks
    python benchmarks/quantize_memory.py --hidden 1024 --intermediate 2816 --heads 16 --blocks 2 4 8
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

# Llama-2-7B.
HIDDEN, INTERMEDIATE, HEADS, VOCAB = 4096, 11008, 32, 32000
BLOCKS = (2, 4, 8)

WORKER = """
import json, sys
from pathlib import Path
from qtool.quantize.options import QuantizeOptions
from qtool.quantize.phases import peak_memory, reset_peak_memory
from qtool.quantize.pipeline import quantize_model

source, out, text, method, samples, seq_len, threads = sys.argv[1:]
import torch
torch.set_num_threads(int(threads))
options = QuantizeOptions(
    method=method, calibration=(text,), samples=int(samples), seq_len=int(seq_len), device="cpu"
)
blocks = []


def listen(step):
    if step.phase == "quantize":
        blocks.append(peak_memory())
        reset_peak_memory()


quantize_model(Path(source), Path(out), options, listen)
phases = json.loads((Path(out) / "qtool" / "run.json").read_text())["phases"]
print(json.dumps({"blocks": blocks, "phases": phases}))
"""


def make_model(folder: Path, shape: argparse.Namespace, blocks: int) -> None:
    """A Llama of random bfloat16 weights; one block is in memory at a time."""
    folder.mkdir(parents=True)
    hidden, wide = shape.hidden, shape.intermediate
    generator = torch.Generator().manual_seed(0)

    def weights(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * size[-1] ** -0.5).bfloat16()

    shards = {
        "model-ends.safetensors": {
            "model.embed_tokens.weight": weights(shape.vocab, hidden),
            "lm_head.weight": weights(shape.vocab, hidden),
            "model.norm.weight": torch.ones(hidden).bfloat16(),
        }
    }
    index: dict[str, str] = {}
    for block in range(blocks + 1):
        name = f"model-block-{block}.safetensors"
        if block < blocks:
            prefix = f"model.layers.{block}"
            linears = {f"self_attn.{letter}_proj": (hidden, hidden) for letter in "qkvo"}
            linears |= {f"mlp.{n}_proj": (wide, hidden) for n in ("gate", "up")}
            linears |= {"mlp.down_proj": (hidden, wide)}
            tensors = {f"{prefix}.{n}.weight": weights(*size) for n, size in linears.items()}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden).bfloat16()
        else:
            name, tensors = shards.popitem()
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    write_json(folder / "config.json", config(shape, blocks))
    write_tokenizer(folder, shape.vocab)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def config(shape: argparse.Namespace, blocks: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "num_hidden_layers": blocks,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Words of one to three letters, in a vocabulary that the model has room for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0} | {f"w{number}": number for number in range(1, min(vocab, 1000))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def measure(folder: Path, shape: argparse.Namespace, blocks: int, method: str) -> dict[str, float]:
    """Peak memory in bytes, of all and of two blocks; seconds of the phase that quantizes."""
    source, out, text = folder / f"model-{blocks}", folder / f"q-{blocks}", folder / "text.txt"
    numbers = torch.randint(1, 1000, (shape.samples * shape.seq_len * 2,)).tolist()
    text.write_text(" ".join(f"w{number}" for number in numbers), encoding="utf-8")
    sizes = [shape.samples, shape.seq_len, shape.threads]
    arguments = [str(value) for value in (source, out, text, method, *sizes)]
    command = [sys.executable, "-c", WORKER, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    phases = {phase["name"]: phase for phase in found["phases"]}
    return {
        "peak": max(*found["blocks"], *(phase["peak_bytes"] for phase in phases.values())),
        "first": found["blocks"][0],
        "last": found["blocks"][-1],
        "seconds": phases["quantize"]["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--intermediate", type=int, default=INTERMEDIATE)
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS)
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq"])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    shape = parser.parse_args()
    print("| method | blocks | weights, bf16 | peak memory | first, last block | quantize |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for blocks in shape.blocks:
            source = Path(folder) / f"model-{blocks}"
            make_model(source, shape, blocks)
            size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
            for method in shape.methods:
                found = measure(Path(folder), shape, blocks, method)
                print(
                    f"| {method} | {blocks} | {size / 1e9:.2f} GB | {found['peak'] / 1e9:.2f} GB | "
                    f"{found['first'] / 1e9:.2f}, {found['last'] / 1e9:.2f} GB | "
                    f"{found['seconds']:.0f} s |",
                    flush=True,
                )
                subprocess.run(["rm", "-r", str(Path(folder) / f"q-{blocks}")], check=True)
            subprocess.run(["rm", "-r", str(source)], check=True)


if __name__ == "__main__":
    main()
