"""Chat templates like those of well-known models, and tokenizers with them that know every byte."""

import json

# ChatML. The tokenizer's end token is another one, as in base models of Qwen.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3: thinking of turns before the last question is dropped; calls as JSON within tags.
QWEN3 = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{% endif %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}\
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
# Llama 3: a BOS of its own, and contents without white space around them; calls are the JSON of one function.
LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one call only') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}{{- m.content | trim }}{% endif %}
    {{- '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
# Mistral: nothing begins a turn of the model but a space; calls need ids of nine characters.
MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
    {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- elif m.tool_calls is defined %}{{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}\
{{- raise_exception('ids of 9 characters') }}{% endif %}
            {{- call.function | tojson }}
        {%- endfor %}{{- ']' + eos_token }}
    {%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}
    {%- else %}{{- raise_exception('only user, assistant and tool') }}{% endif %}
{%- endfor %}"""
# DeepSeek: calls only where content is none, their arguments as text; thinking of earlier turns is cut off.
DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|User|>' + m.content }}
    {%- elif m.role == 'tool' %}{{- '<|tool_output|>' + m.content }}
    {%- elif m.role == 'assistant' and m.content is none %}{{- '<|Assistant|>' }}
        {%- for call in m.tool_calls %}\
{{- '<|tool_call|>' + call.function.name + '\\n' + call.function.arguments }}{% endfor %}
        {{- '<|end_of_sentence|>' }}
    {%- elif m.role == 'assistant' %}\
{{- '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end_of_sentence|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{% endif %}"""
# R1: the beginning of each turn has the tag that begins thinking.
R1 = (
    DEEPSEEK.removesuffix("{% endif %}").removesuffix("{{- '<|Assistant|>' }}")
    + "{{- '<|Assistant|><think>\\n' }}{% endif %}"
)
# No token ends a turn.
PLAIN = (
    "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant: {% endif %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "r1": R1,
    "plain": PLAIN,
}
# (BOS, end token, further special tokens)
SPECIAL = {
    "chatml": (None, "<|endoftext|>", ["<|im_start|>", "<|im_end|>"]),
    "qwen3": (None, "<|endoftext|>", ["<|im_start|>", "<|im_end|>"]),
    "llama3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
    ),
    "mistral": ("<s>", "</s>", ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
    "deepseek": (
        "<|begin|>",
        "<|end_of_sentence|>",
        ["<|User|>", "<|Assistant|>", "<|tool_output|>", "<|tool_call|>"],
    ),
    "r1": (
        "<|begin|>",
        "<|end_of_sentence|>",
        ["<|User|>", "<|Assistant|>", "<|tool_output|>", "<|tool_call|>"],
    ),
    "plain": (None, "<|endoftext|>", []),
}
PAD = "<|pad|>"


def save_tokenizer(folder, kind, special=(), around=None, tokens_of_model=None):
    """Write a tokenizer with one of TEMPLATES and return its folder.

    special: further special tokens.
    around: what it puts around texts, such as `<s> $A`.
    tokens_of_model: vocab_size of a config.json in the folder; None for no such file.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    bos, end, others = SPECIAL[kind]
    names = [PAD, *filter(None, [bos, end]), *others, *special]
    vocabulary = {
        token: number for number, token in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=end,
        additional_special_tokens=[*others, *special],
        clean_up_tokenization_spaces=False,
        **({"bos_token": bos} if bos else {}),
    )
    if around:
        fast.backend_tokenizer.post_processor = TemplateProcessing(
            single=around,
            special_tokens=[(token, vocabulary[token]) for token in names if token in around.split()],
        )
    fast.chat_template = TEMPLATES[kind]
    fast.save_pretrained(folder)
    if tokens_of_model is not None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"vocab_size": tokens_of_model}))
    return str(folder)
