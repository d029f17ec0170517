"""Small tokenizers of the stock classes with hand-written vocabularies, the same in every process.

Trained vocabularies depend on hash order and differ between runs; these are lists. Common words are one token each,
anything else printable falls back to characters, so that different prompts always give different tokens.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence

from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video_image2video
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer, GemmaTokenizerFast, LlamaTokenizerFast, Qwen2Tokenizer, T5TokenizerFast

_WORDS = """
a an the and or of in on at to from with over under behind left right up down through into across
is are it its one two three small large big slow slowly fast quickly still moving
red green blue yellow orange purple pink white black gray brown dark bright
circle square triangle ball box ring star cross line stripes shape background
moves slides falls rises spins turns grows shrinks bounces fades appears walks walking runs running jumps
dog cat bird horse rabbit bunny fish man woman child person car train boat tree flower flowers grass
sky sea water river mountain city street house field forest snow rain sun night day
video clip scene camera shot close view style cinematic motion light shadow
"""
WORDS = tuple(_WORDS.split())
_CHARACTERS = tuple(c for c in string.printable[:95] if c != " ")
IMAGE_TOKEN = "<image>"
IMAGE_TEMPLATE: str = pipeline_hunyuan_video_image2video.DEFAULT_PROMPT_TEMPLATE["template"]
_SPACE = "\u2581"  # how sentencepiece writes a space
_BYTE_SPACE = "\u0120"  # how byte-level BPE does
#: Qwen2's, without its default system message.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def t5_tokenizer(*, words: Sequence[str] = WORDS, model_max_length: int = 512, extra_ids: int = 10) -> T5TokenizerFast:
    """Build a T5 (unigram) tokenizer of these words; cheaper pieces are preferred, so that whole words win."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (_SPACE, -2.0)]  # ids 0, 1, 2 are fixed in the class
    pieces += [(_SPACE + word, -3.0 - 0.001 * i) for i, word in enumerate(words)]
    pieces += [(character, -6.0) for character in _CHARACTERS]
    pieces += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(extra_ids))]
    return T5TokenizerFast(vocab=pieces, extra_ids=extra_ids, model_max_length=model_max_length)


def clip_tokenizer() -> CLIPTokenizer:
    """Build a CLIP (byte-level BPE) tokenizer with its 77 positions."""
    alphabet = sorted(ByteLevel.alphabet())
    merges, merged = merge_chains([*word[:-1], f"{word[-1]}</w>"] for word in WORDS)
    tokens = unique([*alphabet, *(f"{c}</w>" for c in alphabet), *merged, "<|startoftext|>", "<|endoftext|>"])
    return CLIPTokenizer(vocab=token_ids(tokens), merges=merges, model_max_length=77)


def llama_tokenizer(*, model_max_length: int = 512, sees_image: bool = False) -> LlamaTokenizerFast:
    """Build a Llama (BPE) tokenizer that encodes the templates of HunyuanVideo and -I2V to their real lengths.

    The pipeline cuts off the first 95 tokens (`crop_start`), which is the template's text before the prompt. All its
    words, and the line breaks after headers, are single tokens here, and that makes 95 as well; so the cut falls right
    before the prompt. Of I2V's template it is 103, one of them the image's.
    """
    special = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", *([IMAGE_TOKEN] if sees_image else []))
    template = IMAGE_TEMPLATE if sees_image else DEFAULT_PROMPT_TEMPLATE["template"]
    template = re.sub(r"<\|\w+\|>|<image>", " ", template)
    template_words = re.findall(r"[A-Za-z]+", template)
    spaced = [[_SPACE, *word] for word in unique([*template_words, *WORDS])]
    # Words after a header follow no space. They come last, as their merges would split others: "user" splits " used".
    headless = [list(word) for word in ("system", "Describe", "user", *(["assistant"] if sees_image else []))]
    merges, merged = merge_chains([*spaced, *headless, ["\n", "\n"]])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = unique(["<unk>", "<s>", "</s>", "<pad>", *special, *fallback, _SPACE, "\n", *_CHARACTERS, *merged])
    return LlamaTokenizerFast(
        vocab=token_ids(tokens),
        merges=merges,
        pad_token="<pad>",
        padding_side="right",  # the class default is left; HunyuanVideo pads right
        add_bos_token=True,
        model_max_length=model_max_length,
        additional_special_tokens=list(special),
    )


def gemma_tokenizer(*, model_max_length: int = 1024) -> GemmaTokenizerFast:
    """Build a Gemma (BPE) tokenizer, which pads on the left; its first tokens are the class's five special ones."""
    merges, merged = merge_chains([*word] for word in [*WORDS, *(_SPACE + word for word in WORDS)])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = unique(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *fallback, _SPACE, *_CHARACTERS, *merged])
    return GemmaTokenizerFast(vocab=token_ids(tokens), merges=merges, model_max_length=model_max_length)


def template_tokenizer(template: str, *, unspaced: Sequence[str]) -> Qwen2Tokenizer:
    """Build a Qwen2 (byte-level BPE) tokenizer that encodes a pipeline's template to about its real length.

    Pipelines cut off as many tokens as the template's text before the prompt has. All its words and punctuation are
    single tokens here, as most are in the published vocabulary, and so is the space between its lines.

    Args:
        template: the template.
        unspaced: words that follow no space.
    """
    words = [[_BYTE_SPACE, *word] for word in unique([*re.findall(r"[A-Za-z]+", template), *WORDS])]
    # The unspaced words come last, as their merges would split others.
    merges, merged = merge_chains([*words, *(list(word) for word in unspaced)])
    spaces = [_BYTE_SPACE * count for count in (1, 2, 4)]  # eight before each number of a list
    merges += [(part, part) for part in spaces]
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return Qwen2Tokenizer(
        vocab=token_ids(unique([*special, *sorted(ByteLevel.alphabet()), *merged, *(2 * part for part in spaces)])),
        merges=merges,
        model_max_length=2048,
        padding_side="right",
        chat_template=_CHAT_TEMPLATE,
        additional_special_tokens=list(special[1:]),
    )


def merge_chains(words: Iterable[Sequence[str]]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return BPE merges that build each word from its symbols, left to right, and the tokens that they make."""
    merges: dict[tuple[str, str], None] = {}
    for symbols in words:
        current = symbols[0]
        for symbol in symbols[1:]:
            merges.setdefault((current, symbol))
            current += symbol
    return list(merges), unique(left + right for left, right in merges)


def unique(tokens: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(tokens))


def token_ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}
