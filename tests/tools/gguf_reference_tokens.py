# ruff: noqa: RUF001 - ambiguous characters are what is tested
"""Print llama.cpp's token ids for the texts of the tokenizer tests, as JSON.

Needs llama-cpp-python, which is no dependency of this project (install it in an environment of its own)::

    python tests/tools/gguf_reference_tokens.py MODEL.gguf > tests/data/gguf_smollm2_tokens.json

A case is `[text, ids]`, or `[text, ids, ids without special tokens]` where these differ: with `parse_special` off,
llama.cpp takes the text of a special token as plain text.
"""

import json
import sys


def sentences():
    yield from (
        "",
        "Hello",
        "Hello, world!",
        "The capital of France is",
        "Once upon a time, there was a little girl who lived in a village near the forest.",
        "It's they're we've I'm you'll he'd 'tis O'Brien 'S 'LL 'Re",
        "don't DON'T can't won't y'all'd've",
        "UPPER lower MiXeD camelCase snake_case kebab-case dotted.name",
        "supercalifragilisticexpialidocious antidisestablishmentarianism",
        "e.g., i.e., etc. — “quoted” ‘text’ … «guillemets» – dash",
        "$1,234.56 100% #hashtag @user user@example.com https://example.com/a?b=c&d=e#f",
        "naïve café résumé Zürich Škoda Łódź İstanbul Ærø œuvre ß ẞ",
        "Ünïcödé ñandú façade piñata jalapeño",
    )


def code():
    yield from (
        "def add(a, b):\n    return a + b\n",
        "for (int i = 0; i < n; ++i) { sum += x[i]; }\n",
        '#include <stdio.h>\nint main(void) {\n\tprintf("hi\\n");\n\treturn 0;\n}\n',
        "SELECT name, COUNT(*) FROM t WHERE x >= 3 GROUP BY name;",
        '{"key": [1, 2.5e-3, null, true], "nested": {"a": "b"}}',
        '<html><body class="x">&nbsp;</body></html>',
        "x = lambda y: y**2 if y != 0 else ~y & 0xFF | 0b1010 ^ 0o17 << 2",
        "if a == b && c || !d { e->f::g(); }",
        "\\frac{\\alpha}{\\beta} \\int_0^\\infty e^{-x^2} dx",
        "git commit -m 'fix' --amend && cd ../.. ; ls -la | grep foo > /dev/null 2>&1",
        "class A(B):\n\n    x: int = 1\n\n\n    def f(self) -> None: ...\n",
        "\t\tif x:\n\t\t\ty()\n",
        "----====++++****////\\\\\\\\",
        "!!!???...,,,;;;:::",
        "()[]{}<>''\"\"``",
    )


def digits():
    yield from (
        "in 2024",
        " 12345",
        "3.14",
        "0",
        "1234567890",
        "1 2 3 4 5",
        "a1b2c3",
        "1a 2b 3c",
        "2024-01-31T23:59:59Z",
        "+1 (555) 123-4567",
        "v1.2.3-rc4",
        "1,000,000",
        "\u0661\u0662\u0663",
        "\u0967\u0968\u0969",
        "\u00bd \u00b2 \u2167 \u2460",
        "x\u00b2+y\u00b3",
        "\uff11\uff12\uff13",
        "\U0001d7d8\U0001d7d9",
    )


def whitespace():
    for space in (" ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u200b"):
        for count in (1, 2, 3, 4, 5, 8, 13, 32):
            yield space * count
            yield f"a{space * count}b"
        yield f"{space}a"
        yield f"a{space}"
    for count in range(1, 6):
        yield " " * count + "5"
        yield "a" + " " * count + "5b"
        yield " " * count + "\n" + " " * count + "x"
        yield "." + " " * count + "!"
    yield from (
        " \n \n",
        "\n\n \n",
        "a \n b",
        "a\n\nb\n\n\nc",
        " \t \t",
        "\u2028\u2029",
        "\x0b\x0c",
        "a\x0bb\x0cc",
        "\u1680\u2003x",
    )


def scripts():
    yield from (
        "你好，世界！",
        "我喜欢吃苹果。今天天气很好。",
        "こんにちは世界",
        "カタカナとひらがなと漢字",
        "안녕하세요 세계",
        "Привет, мир! Как дела?",
        "Γειά σου Κόσμε",
        "שלום עולם",
        "مرحبا بالعالم",
        "السلام عليكم 123 abc",
        "\u202eRTL override\u202c and \u200fmarks\u200e",
        "नमस्ते दुनिया",
        "สวัสดีชาวโลก",
        "வணக்கம் உலகம்",
        "ሰላም ልዑል",
        "გამარჯობა მსოფლიო",
        "Բարեւ աշխարհ",
        "Tiếng Việt có dấu",
        "mixed 中文 and English と日本語 together",
    )


def signs():
    yield from (
        "\U0001f600",
        " \U0001f600",
        "\U0001f600\U0001f601\U0001f602",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\U0001f469\U0001f3fd\u200d\U0001f680 and \U0001f3f3\ufe0f\u200d\U0001f308",
        "\U0001f1eb\U0001f1f7\U0001f1e9\U0001f1ea",
        "1\ufe0f\u20e3 \u2764\ufe0f \u263a",
        "\u00e9",
        "e\u0301",
        "Cafe\u0301 caf\u00e9",
        "\u1100\u1161\u11a8 \uac01",
        "\u0041\u030a \u00c5 \u212b",
        "z\u0351\u036b\u0343\u036a\u0302a\u0300\u0301\u0302l\u0303g\u0304o\u0305",
        "\ufb01 \ufb02 \u2126 \u00b5",
        "\u221a\u03c0 \u2248 1.77 \u2211 \u222b \u2202 \u2207 \u2200 \u2203 \u2208 \u2205 \u2192 \u21d2",
        "\u2588\u2591 \u250c\u2500\u2510 \u266a \u2605 \u00a9 \u00ae \u2122 \u20ac \u00a3 \u00a5",
        "\ufeffBOM",
        "\ufffd",
        "\U0010ffff",
        "\ue000",
        "\U0001d400\U0001d401",
    )


def controls():
    yield from map(chr, range(0x200))
    yield from (f"a{chr(code)}b" for code in range(1, 0x20))
    yield "".join(map(chr, range(1, 0x80)))
    yield "".join(map(chr, range(0x80, 0x200)))
    yield "\x1b[31mred\x1b[0m"
    yield "a\x7fb"


def specials():
    yield from (
        "<|im_end|>",
        "<|im_start|>",
        "<|endoftext|>",
        "<|im_start|>user\nHi<|im_end|>\n",
        "a<|im_end|>b",
        "a <|im_end|> b",
        "<|im_end|><|im_end|>",
        "<|im_end",
        "|im_end|>",
        "< |im_end|>",
        "<|IM_END|>",
        "<repo_name>x<file_sep>y",
        "<filename>a.py<gh_stars>10",
        "<empty_output> <jupyter_code>print(1)",
        "<unk> <s> </s> [INST] <|eot_id|>",
        "5<|endoftext|>  5",
    )


def runs():
    for unit in ("a", "A", "1", ".", "=", "-", "\u00e9", "\u4e2d", "ab", "a ", "\U0001f600", "Hello"):
        for count in (2, 3, 7, 16, 63, 257):
            yield unit * count


def texts():
    """Every text once, in order."""
    groups = (sentences, code, digits, whitespace, scripts, signs, controls, specials, runs)
    return list(dict.fromkeys(text for group in groups for text in group()))


def main():
    import llama_cpp

    llama = llama_cpp.Llama(model_path=sys.argv[1], vocab_only=True, verbose=False)

    def ids(text, special):
        return llama.tokenize(text.encode(), add_bos=False, special=special)

    cases = []
    for text in texts():
        whole, plain = ids(text, True), ids(text, False)
        cases.append([text, whole] if whole == plain else [text, whole, plain])
    lines = ",\n".join(json.dumps(case) for case in cases)
    print(f'{{"source": "llama.cpp, by llama-cpp-python {llama_cpp.__version__}",\n"cases": [\n{lines}\n]}}')


if __name__ == "__main__":
    main()
