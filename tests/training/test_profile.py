import pytest
import torch

from recsys_norm.training import profile


def test_percentiles_interpolate():
    assert profile.percentile([], 0.5) is None
    assert profile.percentile([3.0], 0.2) == 3.0
    assert profile.percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert profile.percentile(list(range(11)), 0.2) == pytest.approx(2.0)


def test_step_timer_leaves_out_warmup_and_uncounted_steps_and_adds_up_phases():
    timer = profile.StepTimer(torch.device("cpu"), warmup=1)
    for step in range(4):
        timer.begin()
        for _ in range(2):  # two batches of gradient accumulation
            for phase in ("data", "forward", "backward"):
                timer.mark(phase)
        timer.mark("optimizer")
        timer.end(rows=10 + step, tokens=step, count=step != 2)
    times = timer.times()
    assert times.rows == [11, 13] and times.tokens == [1, 3]
    for index, total in enumerate(times.step_ms):
        assert sum(times.phase_ms[phase][index] for phase in profile.PHASES) == pytest.approx(total)
    assert times.per_second(times.rows) == pytest.approx(24e3 / sum(times.step_ms))


def test_times_without_steps_are_none():
    times = profile.StepTimer(torch.device("cpu"), warmup=10).times()
    assert times.percentiles() == {"p20": None, "p50": None, "p80": None}
    assert times.per_second(times.rows) is None and set(times.phases().values()) == {None}


def test_kernel_profile_shares():
    layer_norm = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>"
    kernels = [("gemm", 0, 60), (layer_norm, 60, 20), ("gemm", 90, 10), ("copy on another stream", 50, 20)]
    result = profile.kernel_profile(kernels, steps=2)
    assert result.norm_share == pytest.approx(20 / 110)
    assert result.busy == pytest.approx(90 / 100)  # overlap counts once, the gap of 10 does not
    assert result.kernel_ms["gemm"] == pytest.approx(0.035)
    assert profile.kernel_profile([], steps=2).norm_share is None


@pytest.mark.parametrize(
    "name, expected",
    [
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>", True),
        ("triton_per_fused_native_layer_norm_3", True),
        ("triton_red_fused__fused_rms_norm_mul_1", True),
        ("void at::native::lpnorm_cleanup<float, (at::native::NormType)1>", False),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor>", False),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", False),
        ("norm_linear_kernel", False),
    ],
)
def test_which_kernels_only_normalise(name, expected):
    assert profile.only_normalises(name) is expected


def test_norm_cost_of_known_times():
    times = {"with": [10.0, 12.0, 11.0], "without": [8.0, 8.8, 100.0]}
    assert profile.norm_cost(times) == pytest.approx(1 - 8.8 / 11)


def test_alternate_takes_turns_after_a_warmup():
    calls = []
    times = profile.alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, torch.device("cpu"))
    assert calls[6:] == ["a", "b"] * 3 and [len(t) for t in times.values()] == [3, 3]


def test_peak_flops_only_for_devices_on_record():
    assert profile.peak_flops("NVIDIA H100 80GB HBM3") == profile.peak_flops("NVIDIA H200") == 989e12
    assert profile.peak_flops("NVIDIA A100") is None
