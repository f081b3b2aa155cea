"""What a manifest says of the machine."""

import pytest

from breakeven import machine

AMX = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu avx2 avx512_bf16 amx_bf16\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n"
AVX2 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx avx2 fma\n"


@pytest.mark.parametrize(("text", "computes"), [(AMX, True), (ARM, True), (AVX2, False), (None, False)])
def test_whether_a_cpu_computes_in_bfloat16(text, computes, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    if text:
        machine.CPUINFO.write_text(text)
    machine.cpuinfo.cache_clear()
    found = machine.facts()
    machine.cpuinfo.cache_clear()
    assert found["cpu_bfloat16"] is computes and found["cores"] >= 1
    assert text not in (AMX, AVX2) or found["cpu"] in text


def test_the_fingerprint_is_that_of_the_hardware(monkeypatch):
    before = machine.facts()["fingerprint"]
    monkeypatch.setattr(machine, "cpu_computes_bfloat16", lambda: None)
    assert machine.facts()["fingerprint"] == before
    monkeypatch.setattr(machine, "gpus", lambda: ["another"])
    assert machine.facts()["fingerprint"] != before
