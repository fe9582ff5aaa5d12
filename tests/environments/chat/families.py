"""Tokenizers of several families, made here: their control tokens, and their real templates."""

import functools
from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)
MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
# SmolLM2's, as its model card has it: it knows no tools.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GLM = (
    "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>",
)  # fmt: skip
ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "t"), ("Ġ", "th")]
# Which of them the package `renderers` serves, under what name.
LIBRARY = {
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3.5",
    "glm4moe": "glm-4.5",
    "llama3_1": "llama-3",
}
FAMILIES = {  # (control tokens, other added tokens, end of sequence, template)
    "smollm2": (CHATML, (), "<|im_end|>", SMOLLM2),
    "qwen2_5": (CHATML, MARKS[2:], "<|im_end|>", None),
    "qwen3": (CHATML, MARKS, "<|im_end|>", None),
    "qwen3_instruct_2507": (CHATML, MARKS, "<|im_end|>", None),
    "llama3": (LLAMA, (), "<|eot_id|>", None),
    "llama3_1": (LLAMA, (), "<|eot_id|>", None),
    "phi3": (
        ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
        (),
        "<|endoftext|>",
        None,
    ),
    "qwen3_5_think": (CHATML + VISION, MARKS, "<|im_end|>", None),
    "glm4moe": (
        GLM,
        (*MARKS[:4], "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        GLM[0],
        None,
    ),
    "gemma": (("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), (), "<eos>", None),
}


@functools.cache
def tokenizer_of(family):
    """One token a byte, a few merges, and the family's own tokens."""
    control, others, end, template = FAMILIES[family]
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(MERGES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(control))
    tokenizer.add_tokens(list(others))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    if control[0].startswith(("<|begin", "<bos")):
        made.bos_token = control[0]
    made.chat_template = template or (TEMPLATES / f"{family}.jinja").read_text()
    return made
