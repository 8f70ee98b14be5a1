"""Create the tokenizer of the demo model, with its chat template.

The vocabulary consists of all bytes, the words of the tasks' sentences, and three special tokens; the only merges are
those of words with two characters. So a word of an instruction is one token, and every other word is one token per
byte: a model with a few million parameters can reverse "lamp" only if it sees four letters. Any text can be encoded, so
other datasets work as well, with one token per byte.

The pre-tokenizer is that of Llama 3, for which llama.cpp supports entire words without merges (``ignore_merges``).

Run: python scripts/demo/make_tokenizer.py [--output FOLDER]
"""

import argparse
from pathlib import Path
from string import Formatter

from tasks import COUNTS, OPPOSITES, TASKS, WORDS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MODEL_FOLDER = Path(__file__).parents[2] / "src" / "burnish" / "demo" / "model"
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ROLES = ("system", "user", "assistant")
MAX_TOKENS = 1024

# The generation block contains the trained tokens: the response and the end token of the turn.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Expected the role system, user or assistant. Received: ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def sentence_words(splitter: pre_tokenizers.PreTokenizer) -> list[str]:
    """Return the distinct words of all questions and statements without their fields, in byte-level encoding."""
    sentences = [text for task in TASKS for pair in (*task.questions, task.statements) for text in pair]
    literals = [literal for sentence in sentences for literal, *_ in Formatter().parse(sentence)]
    pieces = [piece for text in (*literals, *ROLES) for piece, _ in splitter.pre_tokenize_str(text)]
    return sorted({piece for piece in pieces if len(piece) > 1})


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer. Its files are the same in every run."""
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitter = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), in_bytes])
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([END_OF_TEXT, TURN_START, TURN_END, *characters])}
    for word in sentence_words(splitter):
        vocabulary[word] = len(vocabulary)

    # With `ignore_merges`, words in the vocabulary are single tokens. llama.cpp rejects tokenizers without merges.
    merges = [(word[0], word[1]) for word in vocabulary if len(word) == 2]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (END_OF_TEXT, TURN_START, TURN_END)])
    _check_spelling(tokenizer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_TOKENS,
    )


def _check_spelling(tokenizer: Tokenizer) -> None:
    """Check that every word in a problem is encoded as single letters, at the start of a text and within it."""
    for word in (*WORDS, *COUNTS, *(word for pair in OPPOSITES for word in pair)):
        tokens = tokenizer.encode(f"{word} {word}").tokens
        if len(tokens) != 2 * len(word) + 1:
            raise ValueError(
                f'Expected "{word}" as single letters. Received: {tokens}. '
                "It is also a word of a question or a statement; take it out of one of the two."
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=MODEL_FOLDER, help="folder of the model (default: %(default)s)")
    output = parser.parse_args().output
    made = make_tokenizer()
    made.save_pretrained(output)
    print(f"{len(made)} tokens, written to {output}")
