"""A ``Modelfile`` for Ollama: template, system message and stop tokens of an exported model.

Ollama's templates use Go's syntax (https://docs.ollama.com/modelfile, "TEMPLATE"). Named templates are converted slot
by slot. For a model with its own chat template none is written, so Ollama must support the model. Tools are omitted.
"""

from __future__ import annotations

from typing import Any

from burnish.data.chat.jinja import slot_text
from burnish.data.chat.rows import Template
from burnish.data.chat.table import CONTENT, Slots, TemplateSpec

DEFAULT_CONTEXT = 4096


def modelfile(template: Template, tokenizer: Any, context: int | None = None, weights: str = "") -> str:
    """The text of the file.

    Args:
        template: the template of the training.
        tokenizer: the exported tokenizer.
        context: context length in tokens; by default 4096, and at most that, since Ollama allocates memory for all of
            it.
        weights: name of a GGUF file in the folder; without it Ollama reads the safetensors.
    """
    lines = [f"FROM ./{weights}" if weights else "FROM .", ""]
    if template.spec is not None:
        lines += [f'TEMPLATE """{go_template(template.spec, tokenizer)}"""', ""]
        if template.spec.default_system:
            lines += [f'SYSTEM """{template.spec.default_system}"""', ""]
    stops = tokenizer.convert_ids_to_tokens(template.stop_token_ids(tokenizer))
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    lines += [f"PARAMETER num_ctx {min(context or DEFAULT_CONTEXT, DEFAULT_CONTEXT)}"]
    return "\n".join(lines) + "\n"


def go_template(spec: TemplateSpec, tokenizer: Any) -> str:
    """The conversation in Ollama's template language.

    The text is LLaMA-Factory's, except that a system message that belongs into the first user message is inserted
    there. A variable holds it until then, because ``.Messages`` contains the system message as well.
    """

    def written(slots: Slots, content: str) -> str:
        return "".join(slot_text(slot, tokenizer) for slot in slots).replace(CONTENT, content)

    system = f"{{{{ if .System }}}}{written(spec.system, '{{ .System }}')}{{{{ end }}}}"
    in_user, content = "", "{{ .Content }}"
    if spec.system_in_user:
        system = "{{ $system := .System }}"
        text = written(spec.system[:1], "{{ $system }}")
        in_user = f'{{{{ if $system }}}}{text}{{{{ $system = "" }}}}{{{{ end }}}}'
    return "".join(
        (
            written(spec.prefix, ""),
            system,
            '{{ range .Messages }}{{ if eq .Role "user" }}',
            written(spec.user, in_user + content),
            '{{ else if eq .Role "assistant" }}',
            written(spec.assistant, content),
            "{{ end }}{{ end }}",
        )
    )
