"""What the machine is found to be, from files that are laid out as systems lay them out."""

import os

import pytest

from zse.errors import ConfigError
from zse.runtime import isa, load, native, probe


@pytest.fixture
def files(monkeypatch):
    """path → content; every other file is missing."""
    content: dict[str, str] = {}
    monkeypatch.setattr(probe, "_read", lambda path: content.get(path, ""))
    monkeypatch.setattr(os, "uname", lambda: type("", (), {"sysname": "Linux", "machine": "x86_64"})())
    monkeypatch.delenv("ZSE_THREADS", raising=False)
    return content


def siblings(files, monkeypatch, groups: list[str], allowed: list[int]):
    monkeypatch.setattr(probe, "allowed_cpus", lambda: allowed)
    for cpu, group in enumerate(groups):
        files[f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = group


def test_hardware_threads_of_a_core_count_once(files, monkeypatch):
    siblings(files, monkeypatch, ["0,4", "1,5", "2,6", "3,7"] * 2, list(range(8)))
    assert probe.physical_cores() == probe.default_threads() == 4


def test_only_allowed_cpus_count(files, monkeypatch):
    siblings(files, monkeypatch, ["0,4", "1,5", "2,6", "3,7"] * 2, [1, 2, 5])
    assert probe.physical_cores() == 2


def test_without_topology_every_cpu_is_a_core(files, monkeypatch):
    siblings(files, monkeypatch, [], [0, 1, 2])
    assert probe.physical_cores() == 3


@pytest.mark.parametrize(
    ("content", "quota", "threads"),
    [
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, None, 8),
        ({"/sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5, 2),
        ({"/sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5, 1),
        ({"/sys/fs/cgroup/cpu.max": "6400000 100000"}, 64, 8),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 3, 3),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None, 8),
        ({}, None, 8),
    ],
)
def test_the_control_group_bounds_the_threads(files, monkeypatch, content, quota, threads):
    siblings(files, monkeypatch, [str(cpu) for cpu in range(8)], list(range(8)))
    files.update(content)
    assert probe.quota_cpus() == quota
    assert probe.default_threads() == threads
    assert load.reads_beside() == (threads == 8)


@pytest.mark.parametrize(
    ("text", "threads"), [("1", 1), ("1024", 1024), ("0", None), ("1025", None), ("-1", None), ("two", None)]
)
def test_the_switch_sets_the_threads(files, monkeypatch, text, threads):
    monkeypatch.setenv("ZSE_THREADS", text)
    if threads is None:
        with pytest.raises(ConfigError, match=f"ZSE_THREADS={text}: not a number from 1 to 1024"):
            probe.default_threads()
    else:
        assert probe.default_threads() == threads


def test_memory_and_its_limit(files):
    files["/proc/meminfo"] = (
        "MemTotal:       16000 kB\nMemFree:  1 kB\nMemAvailable:    9000 kB\nHugePages_Total:       0"
    )
    assert probe.memory_bytes() == {"total": 16_384_000, "available": 9_216_000, "limit": None}
    files["/sys/fs/cgroup/memory.max"] = "max"
    assert probe.memory_bytes()["limit"] is None
    files["/sys/fs/cgroup/memory.max"] = "1000000"
    assert probe.memory_bytes()["limit"] == 1_000_000


@pytest.mark.parametrize(
    ("names", "stat"),
    [
        (("memory.max", "memory.current", "memory.stat"), "anon 5\ninactive_file 100000\nactive_file 20000\nsock 0"),
        (
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
            "inactive_file 7\ntotal_inactive_file 100000\ntotal_active_file 20000",
        ),
    ],
    ids=("v2", "v1"),
)
def test_what_is_left_of_a_limit(files, names, stat):
    """A container of 1 MB on a machine of which 9 are available: others in it have taken 0.68, and 0.12 are pages of files."""
    files["/proc/meminfo"] = "MemTotal: 16000 kB\nMemAvailable: 9000 kB"
    limit, used, told = (f"/sys/fs/cgroup/{name}" for name in names)
    files.update({limit: "1000000", used: "800000", told: stat})
    assert probe.memory_bytes() == {"total": 16_384_000, "available": 320_000, "limit": 1_000_000}
    files[used] = "1500000"
    assert probe.memory_bytes()["available"] == 0
    files[used], files["/proc/meminfo"] = "100000", "MemTotal: 16000 kB\nMemAvailable: 90 kB"
    assert probe.memory_bytes()["available"] == 92_160
    files[used], files["/proc/meminfo"] = "", "MemTotal: 16000 kB\nMemAvailable: 9000 kB"
    assert probe.memory_bytes()["available"] == 1_000_000, "no more than the limit"


def test_the_driver_is_read_from_files_alone(tmp_path, monkeypatch, files):
    (tmp_path / "libcuda.so.580.159").write_bytes(b"")
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.580.159")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}")
    found = probe.cuda_driver()
    assert found["library"] == str(tmp_path / "libcuda.so.1") and found["version"] == "580.159"


def test_levels_need_their_features():
    everything = sum(1 << bit for bit in isa.FEATURES.values())
    assert isa.runnable_levels(0) == []
    assert isa.runnable_levels(everything) == isa.levels_of_machine()
    assert isa.missing_features("x86-64-v3", everything & ~(1 << isa.FEATURES["f16c"])) == ["f16c"]


def test_levels_are_those_that_kernels_are_compiled_for():
    from zse.kernel.targets.cpu import ISAS

    assert set(isa.LEVELS) == set(ISAS)


def test_features_agree_with_the_system():
    flags = probe._read("/proc/cpuinfo")
    if isa.machine() != "x86_64" or "flags" not in flags:
        pytest.skip("no CPU flags to compare with")
    line = next(line for line in flags.splitlines() if line.startswith("flags")).split()
    found = isa.feature_names(native.runtime().zse_cpu_features())
    expected = [
        name for name, bit in isa.FEATURES.items() if bit < 16 and {"avx512vnni": "avx512_vnni"}.get(name, name) in line
    ]
    assert found == expected


def test_facts_are_there_even_without_libraries(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_runtime", None)
    monkeypatch.setenv("ZSE_NATIVE_DIR", str(tmp_path))
    facts = probe.facts()
    assert "python -m zse.build" in facts["error"] and facts["isa"] is None and facts["compiled"] == []
    assert facts["physical_cores"] >= 1 and facts["memory"]["total"] > 1 << 28
