"""Tests that lm-evaluation-harness opens exported folders, and that its bits per byte equal the result of `evaluate=`.

Both programs put a begin-of-text token before each text, and predict the text and an end-of-text token. If
lm-evaluation-harness is installed, it runs in this environment. Otherwise it runs with the Python that LM_EVAL names,
or in an environment that the test creates, which needs a network.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from conftest import ROOT
from environments import python_with
from real_model import fitted, folder_or_skip

TASKS = ROOT / "examples" / "lm_eval"
TASK = "lowmem_bits_per_byte"
# The allowed difference in bits per byte. Computing fp32 sums in another order causes a difference of 1e-7 after full
# training, and of 5e-7 with a merged adapter. Each deliberately wrong comparison differs by 0.09 or more.
BOUND = 1e-4
WRONG = 100 * BOUND
TEXTS = [
    "The committee met twice in the spring. It agreed on a budget, and then on nothing else for a year.\n",
    "Yes",
    "  Überraschung: 北京的春天很短。 Смотри, как быстро тает снег ❄️ — naïve façade, 3 × 4 = 12 €.",
    "def mean(values):\n    return sum(values) / len(values)\n\n\nprint(mean([1, 2, 3]))\n\t\n",
    "Water boils at 100 degrees Celsius at sea level, and at 93 degrees in a town 2,000 metres above it.",
]

pytestmark = [pytest.mark.process, pytest.mark.matrix]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Returns a Python that can import lm-evaluation-harness."""
    if find_spec("lm_eval"):
        return sys.executable
    place = tmp_path_factory.mktemp("lm-eval")
    return python_with(place, "lm-eval[hf]==0.4.13", variable="LM_EVAL", dependencies=True)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Returns (file of training texts, file of validation texts)."""
    folder = tmp_path_factory.mktemp("texts")
    chats = map(json.loads, (ROOT / "examples" / "chat.jsonl").read_text().splitlines()[:40])
    answers = [chat["messages"][-1]["content"] for chat in chats]
    for name, content in (("train", answers), ("val", TEXTS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in content))
    return folder / "train.jsonl", folder / "val.jsonl"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Returns a copy of examples/lm_eval with two deliberately wrong tasks: `no_end` does not predict the end-of-text
    token, and `bytes_of_the_end` counts the bytes of this token as bytes of the text."""
    folder = shutil.copytree(TASKS, tmp_path_factory.mktemp("tasks") / "lm_eval")
    task = (folder / f"{TASK}.yaml").read_text()
    plain = task.replace("!function texts.target", '"{{text}}"')
    (folder / "no_end.yaml").write_text(plain.replace(f"task: {TASK}", "task: no_end"))
    counted = "\n".join(line for line in task.splitlines() if "process_results" not in line)
    (folder / "bytes_of_the_end.yaml").write_text(counted.replace(f"task: {TASK}", "task: bytes_of_the_end"))
    return folder


def scored(python, model, texts, out, tasks=TASKS, names=TASK):
    """Returns {task: bits per byte}, computed by the command of docs/evaluation.md."""
    line = [python, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--include_path", tasks]
    line += ["--model_args", f"pretrained={model},dtype=float32,add_bos_token=False", "--tasks", names]
    line += ["--metadata", json.dumps({"texts": str(texts)}), "--output_path", out]
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "HF_DATASETS_CACHE": str(out.parent / "datasets")}
    done = subprocess.run(list(map(str, line)), env=os.environ | offline, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (file,) = out.rglob("results*.json")
    return {name: result["bits_per_byte,none"] for name, result in json.loads(file.read_text())["results"].items()}


def test_lm_eval_bits_per_byte_of_a_trained_model_equal_those_of_evaluate(tmp_path, python, texts, tasks):
    model, (train, val) = folder_or_skip(), texts
    data = ("data=jsonl", f"data.path={train}", f"data.val_path={val}", "seq_len=256")
    untrained = fitted(model, tmp_path / "untrained", *data, f"evaluate={model}", "data.bos=true")
    at_end = fitted(model, tmp_path / "run", *data, "data.bos=true", "max_steps=2", "lr=1e-4")
    ours, without_bos = (
        fitted(model, tmp_path / f"evaluated {bos}", *data, f"evaluate={tmp_path}/run/model", f"data.bos={bos}")
        for bos in ("true", "false")
    )
    theirs = scored(
        python, tmp_path / "run" / "model", val, tmp_path / "scored", tasks, f"{TASK},no_end,bytes_of_the_end"
    )
    right = theirs.pop(TASK)
    assert abs(right - ours["bits_per_byte"]) < BOUND and abs(right - at_end["bits_per_byte"]) < BOUND
    # Wrong on purpose: the untrained model, texts without a begin-of-text token, no prediction of the end-of-text
    # token, and the bytes of the end-of-text token counted as bytes of the text.
    wrong = [untrained["bits_per_byte"], without_bos["bits_per_byte"], *theirs.values()]
    assert len(wrong) == 4 and min(abs(ours["bits_per_byte"] - one) for one in wrong) > WRONG, wrong


def test_lm_eval_bits_per_byte_of_an_adapter_alone_and_merged_equal_those_of_its_run(tmp_path, python, texts):
    model, (train, val) = folder_or_skip(), texts
    data = ("data=jsonl", f"data.path={train}", f"data.val_path={val}", "seq_len=256", "data.bos=true", "adapter=lora")
    ours = fitted(model, tmp_path / "run", *data, "max_steps=2", "lr=1e-3")["bits_per_byte"]
    fitted(model, tmp_path / "merged", *data, f"export={tmp_path}/run", "merge=true")
    alone = scored(python, f"{model},peft={tmp_path}/run/model", val, tmp_path / "alone_scored")
    merged = scored(python, tmp_path / "merged" / "model", val, tmp_path / "merged_scored")
    assert abs(alone[TASK] - ours) < BOUND and abs(merged[TASK] - ours) < BOUND, (ours, alone, merged)
