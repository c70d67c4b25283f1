"""Write tests/data/tokenizer_smollm2.json: 1,000 texts and what llama.cpp makes of them.

    make_tokenizer_vectors.py SmolLM2-135M-Instruct.Q4_1.gguf tests/data/tokenizer_smollm2.json

Needs llama-cpp-python, which nothing else here does. Control-token text is encoded as plain text.
"""

import json
import random
import sys

from llama_cpp import Llama

NUM_TEXTS = 1000
WORDS = [
    "the",
    "cat's",
    "isn't",
    "we've",
    "they'll",
    "I'm",
    "you'd",
    "HELLO",
    "World",
    "iPhone",
    "naïve",
    "Straße",
    "don't",
    "O'Neil",
    "x's",
    "'tis",
    "re've",
]
SCRIPTS = [
    "漢字かな交じり文",
    "你好，世界！",
    "삼겹살",
    "한국어",
    "Привет,",
    "мир",
    "مرحبا",
    "بالعالم",
    "שלום",
    "नमस्ते",
    "दुनिया",
    "สวัสดี",
    "Γειά",
    "σου",
    "Tiếng",
    "Việt",
    "﷽",
    "꧁꧂",
    "𝕳𝖊𝖑𝖑𝖔",
    "ｆｕｌｌｗｉｄｔｈ",
]
EMOJI = ["🦊", "🧑\u200d🚀", "👩\u200d👩\u200d👧", "❤️", "🇩🇪", "👍🏽", "😀😀", "⚡️", "🏴\u200d☠️", "é", "é", "n̈", "☃"]
NUMBERS = [
    "0",
    "7",
    "42",
    "1234567890",
    "3.14159",
    "-5",
    "1,000,000",
    "2024-01-31",
    "0x1F",
    "1e-10",
    "v2.0.1",
    "½",
    "x²",
    "Ⅷ",
    "٣٤٥",
    "๑๒",
    "10€",
    "$5",
    "50%",
    "三",
    "①",
    "１２３",
    "5th",
]
SPACES = [
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\t\t",
    " \n ",
    "    ",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\u200b",
    "\v",
    "\x85",
]
CODE = (
    "def f(x):\n    return x**2",
    "for (int i=0;i<10;i++){",
    "if a != b && c >= 3:",
    "SELECT * FROM t WHERE id=17;",
    "#include <stdio.h>",
    "print(f'{x:>10.3f}')",
    "https://example.org/a?b=1&c=2#d",
    "C:\\Users\\me\\a_b-c.txt",
    '<div class="x">&amp;</div>',
    "\\frac{a}{b} $x_1^2$",
    '{"key": [1, 2, null]}',
    "git commit -m 'fix #123'",
    "a->b::c<T>()",
    "snake_case camelCase CONST_9",
)
CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_end",
    "<| im_end |>",
    "<|im_start|>system\n",
    "<repo_name>",
    "<file_sep>",
    "[INST]",
    "</s>",
    "<unk>",
    "<|im_end|>\n1",
)
MARKS = (
    "...",
    "!!!",
    "?!",
    "—",
    "“quoted”",
    "'",
    '"',
    "(a)",
    "[1]",
    "~",
    "^",
    "`",
    "|",
    "@user",
    "#1",
    "***",
    "--",
    "\x00",
    "\x07",
    "\x1b[0m",
    "\ufeff",
    "\ufffd",
)
KINDS = (WORDS, WORDS, SCRIPTS, EMOJI, NUMBERS, NUMBERS, SPACES, SPACES, CODE, CONTROL, MARKS)


def main(model: str, target: str) -> None:
    chance = random.Random(20250101)
    texts = dict.fromkeys(piece for kind in KINDS for piece in kind)
    texts |= dict.fromkeys(space + number for space in SPACES for number in NUMBERS)
    while len(texts) < NUM_TEXTS:
        pieces = [chance.choice(chance.choice(KINDS)) for _ in range(chance.randint(2, 9))]
        texts[chance.choice(("", "", " ")).join(pieces)] = None
    llama = Llama(model, vocab_only=True, verbose=False)
    rows = [[text, llama.tokenize(text.encode(), add_bos=False, special=False)] for text in list(texts)[:NUM_TEXTS]]
    with open(target, "w", encoding="utf-8") as handle:
        handle.write("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
