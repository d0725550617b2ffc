"""Tiny networks with random weights, one of each kind to support; batches, elastic forms and chains for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexrank.data.batches import call_model, output_tensor
from flexrank.deployment import deploy
from flexrank.nn.experts import separate_experts_
from flexrank.nn.linalg import plain_svd
from flexrank.nn.matrix import weight_matrix
from flexrank.nn.select import nest_, select_layers
from flexrank.nn.switch import footprint, layer_shapes, nested_layers
from flexrank.profiles import ChainEntry, ProfileChain, RankProfile
from flexrank.profiles.costs import full_ranks

VOCABULARY = 64
ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = ENCODER | {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
DECODER = TEXT | {"num_key_value_heads": 2}
IMAGE = ENCODER | {"image_size": 16, "patch_size": 4}


class TiedBlocks(nn.Module):
    """A module used twice, batch normalisation, and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.GELU())
        self.shared = nn.Linear(20, 20)
        self.again = self.shared
        self.head = nn.Linear(20, 6, bias=False)
        self.register_buffer("shift", torch.linspace(0, 1, 20), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(torch.relu(self.shared(self.first(x)) + self.shift)))


def tied_blocks() -> nn.Module:
    return TiedBlocks().eval()


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 16, bias=False), nn.ReLU(), nn.Linear(16, 6)
    ).eval()  # fmt: skip


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 20, 3, stride=2, padding=1, dilation=2, bias=False),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(80, 6),
    ).eval()  # fmt: skip


def llama_untied(*, tied: bool = False) -> Any:
    """Grouped-query attention: four heads on two."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DECODER, tie_word_embeddings=tied)).eval()


def llama_tied() -> Any:
    """The head is the embedding."""
    return llama_untied(tied=True)


def qwen3() -> Any:
    """Norms of queries and keys, and a head size of its own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**DECODER, head_dim=16, tie_word_embeddings=True)).eval()


def phi3() -> Any:
    """Fused `qkv_proj` and `gate_up_proj`."""
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**DECODER, pad_token_id=0, bos_token_id=1, eos_token_id=2)).eval()


def gpt2() -> Any:
    """`Conv1D` layers, a fused `c_attn`, a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()


def bert() -> Any:
    """An encoder of sentences, with a pooler."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**TEXT)).eval()


def vit() -> Any:
    """An image classifier."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**IMAGE, num_labels=5)).eval()


def dinov3() -> Any:
    """An encoder of images with rotary positions."""
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    return DINOv3ViTModel(DINOv3ViTConfig(**IMAGE)).eval()


def gemma3() -> Any:
    """A text model whose attention looks back four tokens in one block, and at all in the other."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    return Gemma3ForCausalLM(Gemma3TextConfig(**DECODER, **layers, head_dim=16)).eval()


def mistral() -> Any:
    """Attention looks back four tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**DECODER, sliding_window=4)).eval()


def gpt_neox() -> Any:
    """A fused `query_key_value`, and rotary positions for a part of each head."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**TEXT)).eval()


def opt() -> Any:
    """Embeddings narrower than the blocks, with layers between them; a tied head."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 16}
    return OPTForCausalLM(OPTConfig(**sizes)).eval()


def t5() -> Any:
    """An encoder-decoder without biases, with learned relative positions and a tied head."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()


def bart() -> Any:
    """An encoder-decoder with biases, whose embeddings and head are one tensor."""
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
    return BartForConditionalGeneration(BartConfig(**sizes)).eval()


def mixtral() -> Any:
    """Two of four experts for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)).eval()


def qwen3_moe() -> Any:
    """Two of four narrow experts for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**DECODER, **experts, head_dim=16)).eval()


Build = Callable[[], Any]
PLAIN: dict[str, Build] = {build.__name__: build for build in (perceptron, convnet, tied_blocks)}
TRANSFORMERS: dict[str, Build] = {
    build.__name__: build for build in (bert, llama_tied, llama_untied, gpt2, qwen3, phi3, vit, dinov3)
}
#: What the tests of single stages leave out; `compatibility.py` takes these all the way too.
OTHERS: dict[str, Build] = {
    build.__name__: build for build in (gemma3, mistral, gpt_neox, opt, t5, bart, mixtral, qwen3_moe)
}
ARCHITECTURES = TRANSFORMERS | OTHERS
CAUSAL = ("llama_tied", "llama_untied", "gpt2", "qwen3", "phi3")
VISION = (vit, dinov3)
TWO_SIDED = ("t5", "bart")
#: The auto class of transformers that loads each.
AUTO = dict.fromkeys(ARCHITECTURES, "AutoModelForCausalLM") | dict.fromkeys(TWO_SIDED, "AutoModelForSeq2SeqLM")
AUTO |= {"bert": "AutoModel", "vit": "AutoModelForImageClassification", "dinov3": "AutoModel"}
#: Which of them the tests write as programs of other runtimes.
PROGRAMS = {"torch": ("bert", "vit"), "onnx": ("llama_tied", "gpt2"), "openvino": ("phi3",), "executorch": ("bert",)}


def build(name: str, seed: int = 0) -> Any:
    """The network `name`, with biases and norms off their initial zeros and ones."""
    torch.manual_seed(seed)
    model = (ARCHITECTURES | PLAIN)[name]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def batch_for(name: str) -> Any:
    """A batch of three for the network `name`."""
    if name in TWO_SIDED:
        return token_batch() | decoder_batch()
    if name in ARCHITECTURES and ARCHITECTURES[name] not in VISION:
        return token_batch()
    generator = torch.Generator().manual_seed(0 if name in TRANSFORMERS else 1)
    if name in TRANSFORMERS:
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator)}
    return torch.randn(*((3, 3, 8, 8) if name == "convnet" else (3, 12)), generator=generator)


def token_batch() -> dict[str, torch.Tensor]:
    """Three rows of ten random tokens; the last row's last three are padding."""
    ids = torch.randint(3, VOCABULARY, (3, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[-1, -3:], mask[-1, -3:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def decoder_batch() -> dict[str, torch.Tensor]:
    """Three rows of seven random tokens for a decoder; the first row's last two are padding."""
    ids = torch.randint(3, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    ids[0, -2:], mask[0, -2:] = 0, 0
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}


class WordTokenizer:
    """One token per word, a checksum of it; takes the options of transformers' tokenizers."""

    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

    def __call__(
        self, text: list[str], *, truncation: bool = False, max_length: int | None = None,
        add_special_tokens: bool = True, verbose: bool = True,
    ) -> dict[str, list[list[int]]]:  # fmt: skip
        rows = []
        for one in text:
            row = [3 + sum(word.encode()) % (VOCABULARY - 3) for word in one.split()]
            if add_special_tokens:
                row = [self.bos_token_id, *row][: max_length if truncation else None]
            rows.append(row)
        return {"input_ids": rows}


def outputs(model: nn.Module, batch: Any) -> torch.Tensor:
    """The tensor of the model's output."""
    with torch.no_grad():
        return output_tensor(call_model(model, batch))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The length of the difference over that of `wanted`."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def agree(output: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether the same weights, loaded anew, gave the same outputs.

    A few roundings may differ: kernels choose their order of sums by where in memory a tensor begins.
    """
    bound = 2**-7 if wanted.dtype == torch.bfloat16 else 1e-6
    alike = output.dtype == wanted.dtype and output.shape == wanted.shape
    return alike and bool((output - wanted).norm() <= bound * wanted.norm())


def same_state(model: nn.Module, wanted: nn.Module) -> bool:
    """Whether both states have the same names and the same bits."""
    state, other = model.state_dict(), wanted.state_dict()
    return state.keys() == other.keys() and all(torch.equal(value, state[name]) for name, value in other.items())


def flip_a_bit(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def nest(model: nn.Module, **selection: Any) -> nn.Module:
    """The model with every layer elastic, or those of the selection, by plain SVD."""
    for name, layer in select_layers(model, **selection).items():
        nest_(model, name, plain_svd(weight_matrix(layer).detach()))
    return model


def elastic(name: str) -> Any:
    """The network `name` with every layer elastic."""
    model = build(name)
    separate_experts_(model)
    return nest(model)


@torch.no_grad()
def with_sizes(model: nn.Module, budgets: tuple[float, ...] = (0.25, 0.8, 1.0), dense: bool = False) -> nn.Module:
    """The elastic model, with vectors of its own for each of these sizes, and if asked matrices, drawn at random."""
    entries = chain_of(model, budgets).entries
    for name, layer in nested_layers(model).items():
        layer.set_sizes_([entry.profile[name] for entry in entries])
        if dense:
            layer.set_dense_()
        for own in (*layer.sizes.parameters(), *([layer.dense] if dense else [])):
            own += 0.2 * torch.randn_like(own)
    return model


def chain_of(model: nn.Module, budgets: tuple[float, ...] = (0.25, 0.5, 0.8, 1.0)) -> ProfileChain:
    """A chain of equal shares of every layer's parameters; its predicted errors are made up."""
    shapes = {name: layer.matrix_shape for name, layer in nested_layers(model).items()}
    dense = sum(m * n for m, n in shapes.values())
    entries = []
    for budget in budgets:
        limits = {name: max(budget * m * n, m + n - 1) for name, (m, n) in shapes.items()}
        ranks = {
            name: max(r for r in range(1, min(m, n) + 1) if r * (m + n - r) <= limits[name])
            for name, (m, n) in shapes.items()
        }
        parameters = sum(rank * (sum(shapes[name]) - rank) for name, rank in ranks.items())
        entries.append(ChainEntry(RankProfile(ranks), parameters, 1 - budget, parameters / dense))
    return ProfileChain(tuple(entries), dense, footprint(model), "uniform")


def partly_dense(name: str) -> Any:
    """As `deployed`, with the first layer of each block dense."""
    model = elastic(name)
    profile, full = chain_of(model).entries[1].profile, full_ranks(layer_shapes(model))
    whole = {one: full[one] for one in profile if one.endswith(("q_proj", "c_attn"))}
    return deploy(model, RankProfile({**profile, **whole}))


def deployed(name: str, index: int = 1, **options: Any) -> Any:
    """The network `name`, elastic and deployed at one of the four profiles of its chain."""
    model = elastic(name)
    return deploy(model, chain_of(model).entries[index].profile, **options)
