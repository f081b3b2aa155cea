import subprocess
import sys
from pathlib import Path

import pytest

import factory
from breakeven import artefacts, diagnose
from breakeven.cli import UserError
from breakeven.diagnose import Run

ROOT = Path(__file__).parents[2]
DATA = artefacts.read_json(ROOT / "resources" / "expectations.json")


def said(run, target=None):
    return "\n".join(
        f"{section.title}: {line}" for section in diagnose.diagnose(run, DATA, target) for line in section.lines
    )


def script(*arguments):
    command = [sys.executable, ROOT / "scripts" / "diagnose.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={"COLUMNS": "100"}, cwd=ROOT)
    return done.returncode, " ".join(done.stdout.split()), done.stderr


def test_the_reference_case():
    """It says what docs/design.md, section 8, says, from the recorded numbers alone."""
    code, text, _ = script("--case", "resources/reference-case.json")
    assert code == 0
    for sentence in (
        "54.6 against 82.5 tok/s: 0.66x",
        "rho = AL / speed-up = 3.17 to 3.97 (middle 3.57)",  # contains the 3.4 to 3.7 of the design
        "the two acceptance rates are different quantities: vLLM's 15% is accepted / drafted tokens without the bonus",
        "12.5% to 15.6% in SGLang 0.5.9 to 0.5.10 (bonus counted); 6.7% to 10.0% in SGLang from 0.5.11 on",
        "5 and 16 draft tokens ran at 53.2 and 56.7 tok/s: at equal AL the step time is flat",
        "the cost is mostly a fixed overhead per step (as without CUDA graphs), not verification",
        "the best published head for Kimi-K2.5 reaches AL 3.46 at K = 5: 0.97x at rho 3.57",
        "more data could not have paid at this rho; the step cost has to fall",
        "10,000 samples give AL about 1.5 in public reports: the 15% was the expected outcome",
        "57,344 bytes per token, so 828 GB hold 14.4M tokens; 88,000 samples would need 7.3 TB",
        "not comparable with each other: SGLang at temperature 0, 1024 tokens; vLLM at temperature 0.6, 512 tokens",
        "3: 1.45 (rho 2.19)",
        "if the speeds hold, the cause is cost",
    ):
        assert sentence in text, sentence
    for wrong in ("the cause is training", "the cause is integration"):
        assert wrong not in text


def test_fine_acceptance_at_a_dear_step_is_cost():
    """B088: tau 2.5, 59 against 61 tok/s, K not recorded."""
    text = said(Run(61, 59, lengths=(2.5, 2.5)))
    assert (
        "rho = AL / speed-up = 2.58" in text
        and "the cause is cost" in text
        and "training" not in text.split("Check")[0]
    )


def test_a_published_speedup_is_split():
    """B089: 4.4x published, 1.5x here; B090: the same AL at 276 and 378 tok/s is cost alone."""
    lines = " ".join(diagnose.gap(Run(100, 150, lengths=(3.0, 3.0)), 4.4, 6.0))
    assert "2.00 from acceptance x 1.47 from step cost" in lines and "64% of the gap" in lines
    lines = " ".join(diagnose.gap(Run(100, 276, lengths=(5.36, 5.36)), 3.78, 5.39))
    assert "2% of the gap" in lines
    code, text, _ = script("--baseline", 100, "--speculative", 150, "--accept-length", 3, "--expected-speedup", 4.4,
                           "--expected-accept-length", 6)  # fmt: skip
    assert code == 0 and "Gap:" in text


@pytest.mark.parametrize(
    "engine, version, source, length",
    [
        ("vllm", "0.32.0", "log", 1 + 0.3 * 4),
        ("sglang", "0.5.5", "log", 0.3 * 4),  # steps + 1 = 4, bonus counted
        ("sglang", "0.5.9", "log", 0.3 * 4),
        ("sglang", "0.5.10", "log", 0.3 * 4),
        ("sglang", "0.5.11", "log", 1 + 0.3 * 3),
        ("sglang", "0.5.12.post1", "log", 1 + 0.3 * 3),
        ("sglang", "0.5.23", "log", 1 + 0.3 * 3),
        ("sglang", "0.5.5", "request", 1 + 0.3 * 3),
        ("sglang", "0.5.23", "request", 1 + 0.3 * 3),
    ],
)
def test_the_same_rate_is_another_length_in_each_engine(engine, version, source, length):
    run = Run(30, 40, engine=engine, version=version, rate=0.3, rate_source=source, draft_tokens=4)
    (reading,) = diagnose.read_rate(run)
    assert reading.length == pytest.approx(length)


def test_trees_differ_between_versions():
    run = {"engine": "sglang", "rate": 0.3, "draft_tokens": 16, "num_steps": 5}
    lengths = {v: diagnose.read_rate(Run(30, 40, version=v, **run))[0].length for v in ("0.5.5", "0.5.9", "0.5.23")}
    assert lengths == {"0.5.5": pytest.approx(1.8), "0.5.9": pytest.approx(4.8), "0.5.23": pytest.approx(5.5)}


def test_an_unknown_version_gets_every_reading():
    run = Run(30, 40, engine="sglang", rate=0.5, draft_tokens=4)
    assert [round(r.length, 2) for r in diagnose.read_rate(run)] == [2.0, 2.5]
    assert "SGLang changed what its rate means" in said(run)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rate": 1.2}, "rate of 1.2 is impossible"),  # B072
        ({"lengths": (4.5, 4.5), "draft_tokens": 3}, "above K \\+ 1 = 4"),
        ({"lengths": (0.5, 0.5)}, "at least 1"),
        ({"engine": "sglang", "version": "0.5.9", "rate": 0.1, "draft_tokens": 4}, "gives acceptance length 0.40"),
        ({"engine": "sglang", "lengths": (5.0, 5.0), "draft_tokens": 16, "num_steps": 3}, "above K \\+ 1 = 4"),
    ],
)
def test_impossible_values_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        diagnose.diagnose(Run(30, 40, **arguments), DATA)


def test_the_histogram_of_one_glossary():
    """B074: [39, 1, 0, 3] is AL 1.2326 and rate 0.0775 in vLLM's sense."""
    reading = diagnose.read_rate(Run(30, 40, engine="vllm", rate=10 / 129, draft_tokens=3))[0]
    assert reading.length == pytest.approx(1.2326, abs=1e-4)


def vllm_metrics(scale, engines=2):
    lines = ["# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts."]
    for engine in range(engines):
        labels = f'engine="{engine}",model_name="target"'
        for name, value in (("drafts", 100), ("draft_tokens", 300), ("accepted_tokens", 130)):
            lines.append(f"vllm:spec_decode_num_{name}_total{{{labels}}} {float(value * scale)}")
            lines.append(f"vllm:spec_decode_num_{name}_created{{{labels}}} 1.7e+09")
        for position, value in enumerate((60, 40, 30)):
            lines.append(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{position}"}} {value * scale}'
            )
    return "\n".join(lines) + "\n"


def test_vllm_metrics_are_summed_over_engines(tmp_path):
    (tmp_path / "a").write_text(vllm_metrics(1))
    (tmp_path / "b").write_text(vllm_metrics(3))
    found = diagnose.read_metrics(tmp_path / "a", tmp_path / "b")
    assert (found["counts"].steps, found["counts"].accepted) == (400, (240, 160, 120))
    assert found["lengths"][0] == pytest.approx(2.3) and found["draft_tokens"] == 3
    with pytest.raises(UserError, match="restarted"):
        diagnose.read_metrics(tmp_path / "b", tmp_path / "a")
    with pytest.raises(UserError, match="no verification step"):
        diagnose.read_metrics(tmp_path / "a", tmp_path / "a")
    (tmp_path / "c").write_text("process_cpu_seconds_total 3\n")
    with pytest.raises(UserError, match="no vllm: or sglang: metric"):
        diagnose.read_metrics(tmp_path / "a", tmp_path / "c")


def test_sglang_metrics(tmp_path):
    def write(name, calls, tokens, requests):
        labels = 'model_name="target",engine_type="unified"'
        (tmp_path / name).write_text(
            f"sglang:spec_verify_calls_total{{{labels}}} {calls}\nsglang:generation_tokens_total{{{labels}}} {tokens}\n"
            f"sglang:num_requests_total{{{labels}}} {requests}\nsglang:spec_accept_length{{{labels}}} 1.9\n"
        )

    write("a", 100.0, 210.0, 2.0)
    write("b", 300.0, 714.0, 6.0)
    assert diagnose.read_metrics(tmp_path / "a", tmp_path / "b")["lengths"][0] == pytest.approx(2.5)
    for name in "ab":  # an older version: only the gauge
        (tmp_path / name).write_text('sglang:spec_accept_length{model_name="target"} 1.9\n')
    assert diagnose.read_metrics(tmp_path / "a", tmp_path / "b")["lengths"] == (1.9, 1.9)


VLLM_LOG = """\
(APIServer pid=1) INFO api_utils.py:286] non-default args: {'model': 'target', 'enforce_eager': True}
(EngineCore pid=2) INFO core.py:134] Initializing a V1 LLM engine (v0.32.0) with config: model='target', \
speculative_config=SpeculativeConfig(method='eagle3', model='drafter', num_spec_tokens=3), enforce_eager=True, seed=0
(EngineCore pid=2) INFO gpu_model_runner.py:5244] Using auxiliary layers from speculative config: (2, 15, 27)
(EngineCore pid=2) INFO llm_base_proposer.py:1441] Detected EAGLE model without its own embed_tokens in the checkpoint. \
Sharing target model embedding weights with the draft model.
(EngineCore pid=2) INFO llm_base_proposer.py:1519] Detected EAGLE model without its own lm_head in the checkpoint. \
Sharing target model lm_head weights with the draft model.
(APIServer pid=1) INFO metrics.py:130] SpecDecoding metrics: Mean acceptance length: 2.00, Accepted throughput: 9.99 \
tokens/s, Drafted throughput: 29.99 tokens/s, Accepted: 100 tokens, Drafted: 300 tokens, Per-position acceptance rate: \
0.500, 0.300, 0.200, Avg Draft acceptance rate: 33.3%
(APIServer pid=1) INFO metrics.py:130] SpecDecoding metrics: Mean acceptance length: 3.00, Accepted throughput: 9.99 \
tokens/s, Drafted throughput: 29.99 tokens/s, Accepted: 600 tokens, Drafted: 900 tokens, Per-position acceptance rate: \
0.800, 0.700, 0.500, Avg Draft acceptance rate: 66.7%
"""
SGLANG_LOG = """\
[2026-01-01 10:00:00] server_args=ServerArgs(model_path='target', disable_cuda_graph=False, speculative_algorithm='EAGLE', \
speculative_draft_model_path='drafter', speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)
[2026-01-01 10:01:00] Decode batch, #running-req: 1, #token: 100, token usage: 0.01, accept len: 1.00, accept rate: 0.25, \
cuda graph: False, gen throughput (token/s): 21.0, #queue-req: 0,
[2026-01-01 10:01:01] Decode batch, #running-req: 1, #token: 140, token usage: 0.01, accept len: 1.00, accept rate: 0.25, \
cuda graph: False, gen throughput (token/s): 21.0, #queue-req: 0,
"""


def test_a_vllm_log(tmp_path):
    (tmp_path / "log").write_text(VLLM_LOG)
    found = diagnose.read_log(tmp_path / "log")
    assert (found.engine, found.version, found.algorithm, found.draft_tokens) == ("vllm", "0.32.0", "eagle3", 3)
    assert found.graphs is False and found.layers == [2, 15, 27]
    assert found.shares_head is True and found.shares_embeddings is True
    assert found.counts.steps == 400 and found.counts.accepted == (290, 240, 170)  # not the mean of the two lines
    code, text, _ = script("--baseline", 30, "--speculative", 25, "--log", tmp_path / "log")
    assert code == 0 and "CUDA graphs are off" in text and "inputs of these layers" in text
    assert "the log says the target's lm_head is shared" in text


def test_an_sglang_log_with_the_wrong_algorithm(tmp_path):
    (tmp_path / "log").write_text(SGLANG_LOG)
    found = diagnose.read_log(tmp_path / "log")
    assert (found.engine, found.algorithm, found.num_steps, found.topk, found.draft_tokens) == (
        "sglang",
        "EAGLE",
        3,
        1,
        4,
    )
    assert found.graphs is False and found.length == 1.0
    code, text, _ = script("--baseline", 90, "--speculative", 60, "--log", tmp_path / "log")
    assert code == 0 and "no draft is accepted: the algorithm flag (EAGLE3, not EAGLE)" in text
    newer = SGLANG_LOG.replace("ServerArgs(", "{").replace("speculative_algorithm='", "'speculative_algorithm': '")
    (tmp_path / "log").write_text(newer)
    assert diagnose.read_log(tmp_path / "log").algorithm == "EAGLE"


def test_a_checkpoint_is_checked_with_the_logs_settings(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    (tmp_path / "log").write_text(SGLANG_LOG)
    code, text, error = script("--baseline", 90, "--speculative", 60, "--log", tmp_path / "log", "--engine-version",
                               "0.5.23", "--checkpoint", drafter, "--target", target)  # fmt: skip
    assert code == 0, error
    assert "ERROR algorithm" in text
    # Without the log topk is not known, and what was set there is not judged.
    code, text, error = script("--baseline", 90, "--speculative", 60, "--engine", "sglang", "--engine-version", "0.5.23",
                               "--draft-tokens", 4, "--num-steps", 3, "--checkpoint", drafter, "--target", target)  # fmt: skip
    assert code == 0, error
    assert "draft-tokens" not in text and "ERROR" not in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--baseline", "30"], "give --baseline and --speculative"),
        (["--baseline", "0", "--speculative", "3"], "baseline 0.0 is no speed"),
        (["--baseline", "30", "--speculative", "40", "--accept-rate", "120%"], "is impossible"),
        (["--baseline", "30", "--speculative", "40", "--log", "nowhere.log"], "nowhere.log: no such file"),
        (["--baseline", "30", "--speculative", "40", "--log", "Makefile"], "neither a vLLM nor an SGLang server log"),
        (["--baseline", "30", "--speculative", "40", "--checkpoint", "x"], "--checkpoint and --target together"),
        (["--case", "config.yaml"], "not valid JSON"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message):
    code, _, error = script(*arguments)
    assert code == 1 and error.startswith("error: ") and message in error and len(error.strip().splitlines()) == 1
