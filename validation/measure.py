"""Builds the CUDA twins, checks them, profiles and times them, and writes what was measured.

    python -m validation.measure [KERNEL...] --gpu h200 --out validation/measured/h200

runs on a machine with a GPU, nvcc and Nsight Compute. Each kernel is one source ``cuda/KERNEL.cu``, built by

    nvcc -std=c++17 -O3 -arch=sm_90 -lineinfo -o KERNEL validation/cuda/KERNEL.cu

(the architecture is the GPU's), and one result ``KERNEL.json``: a list of runs, a run being a case (variant and
parameters) with its launch, its time, its counters per site and those of the whole launch. Clocks are left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime, timezone
from itertools import product
from pathlib import Path

import click

from simgpu.errors import SimError
from validation.ncu import COLUMNS, by_site, folder_sites, line_table, read_report

SOURCES = Path(__file__).parent / "cuda"
NVCC_FLAGS = ("-std=c++17", "-O3", "-lineinfo")
NCU_FLAGS = ("--clock-control", "none", "--profile-from-start", "off")

SHARED_COUNTS, GLOBAL_COUNTS = ("pipe_lsu_wavefronts", "bank_conflicts_pipe_lsu"), ("sectors", "requests")
SHARED_OPS = ("", "_op_ld", "_op_st", "_op_atom", "_op_ldsm", "_op_stsm", "_op_ldgsts", "_op_ldgsts_cache_access",
              "_op_ldgsts_cache_bypass")
GLOBAL_OPS = ("ld", "st", "ldgsts", "ldgsts_cache_access", "ldgsts_cache_bypass", "atom", "red")

# Counted per instruction, exact: equality is required of these.
EXACT = (
    *COLUMNS,
    *(f"smsp__sass_l1tex_data_{what}_mem_shared{op}.sum" for what, op in product(SHARED_COUNTS, SHARED_OPS)),
    *(f"smsp__sass_l1tex_t_{what}_pipe_lsu_mem_global_op_{op}.sum" for what, op in product(GLOBAL_COUNTS, GLOBAL_OPS)),
    *(f"smsp__sass_inst_executed_op_{op}.sum"
      for op in ("shared_ld", "shared_st", "global_ld", "global_st", "ldsm", "ldgsts", "local", "ld", "st")),
)
# Counted by the units themselves, with the noise of arbitration: reported beside the exact ones.
HARDWARE = (
    *(f"l1tex__data_{what}_mem_shared{op}.sum" for what, op in product(SHARED_COUNTS, SHARED_OPS)),
    "l1tex__data_pipe_lsu_wavefronts.sum",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    *(f"l1tex__t_{what}_pipe_lsu_mem_global_op_{op}.sum" for what, op in product(GLOBAL_COUNTS, ("ld", "st"))),
    *(f"l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_{how}.sum" for how in ("hit", "miss")),
    "l1tex__m_xbar2l1tex_read_sectors.sum",
    "l1tex__m_l1tex2xbar_write_sectors.sum",
    "lts__t_requests_srcunit_tex.sum",
    "lts__t_sectors_srcunit_tex.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_op_write.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.max",
    "sm__cycles_active.avg",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.sum",
    "smsp__inst_executed.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
)
# What Nsight Compute says of every launch, of which these are kept.
LAUNCH = ("launch__occupancy_limit_blocks", "launch__occupancy_limit_registers", "launch__occupancy_limit_shared_mem",
          "launch__occupancy_limit_warps", "launch__shared_mem_config_size", "launch__waves_per_multiprocessor")
ACHIEVED = "sm__warps_active.avg.pct_of_peak_sustained_active"


# ---- what is measured ------------------------------------------------------------------------------------------------


def case(variant: str, **params: int) -> str:
    """A case as the programs read it.

    >>> case("pad1", rows=64, cols=32)
    'pad1,rows=64,cols=32'
    """
    return ",".join([variant, *(f"{key}={value}" for key, value in params.items())])


def transpose_cases() -> list[str]:
    """Square matrices in and beyond the L2 cache, odd sizes, and sources off their alignment."""
    scalar, every = ("plain", "pad1", "xor"), ("plain", "pad1", "xor", "vec4")
    cases = [case(v, rows=n, cols=n) for n in (2048, 4096) for v in every]
    cases += [case(v, rows=1000, cols=1500) for v in every] + [case(v, rows=1023, cols=777) for v in scalar]
    cases += [case(v, rows=2048, cols=2048, src_offset=1) for v in scalar]
    return cases + [case(v, rows=2048, cols=2048, src_offset=4) for v in every]


def hgemm_cases() -> list[str]:
    """The ladder and its older rungs; every other choice of stages, swizzle, load and epilogue at one size each."""
    ladder, rungs = ("A1", "A2", "A2L", "A3"), ("naive", "bcf", "bcf_dbf", "bcf_dbf_rw")
    cases = []
    for m, n, k in ((4096, 4096, 4096), (1024, 1024, 1024), (512, 256, 128)):
        size = {"m": m, "n": n, "k": k}
        cases += [case(v, **size) for v in (*ladder, *rungs)]
        cases += [case(v, **size, swizzle=0) for v in ladder]
        if m != 1024:
            cases += [case(v, **size, stages=s, swizzle=z) for s in (1, 2, 4) for z in (0, 1) for v in ladder]
            cases += [case(v, **size, load_mode=0) for v in ladder] + [case(v, **size, staged=1) for v in ladder]
    return cases


def smem_to_reg_cases() -> list[str]:
    """Each variant with and without swizzle and mma, one and two CTAs on a multiprocessor."""
    return [case(v, iterations=256, swizzle=z, mma=m, ctas=c)
            for c, m, z, v in product((1, 2), (0, 1), (1, 0), ("A1", "A2", "A2L", "A3"))]


BIG = {"tokens": 8192, "sequences": 1, "heads": 8}
RAGGED = {"tokens": 1000, "sequences": 3, "heads": 4}  # the last chunk of a sequence is not full


def kda_cases(variants: tuple[str, ...], singles: tuple[tuple[str, dict], ...]) -> list[str]:
    """Every variant, and some with a parameter changed, on many full tiles; the variants on ragged ones too."""
    return [*(case(v, **size) for size in (BIG, RAGGED) for v in variants), *(case(v, **BIG, **p) for v, p in singles)]


def kda_b1_cases() -> list[str]:
    """B1: the variants; every staging stride and vector width; the union, the round trip and B0 in other layouts."""
    singles = [("movm", {"stage_stride": s, "stage_vec": v}) for s in (128, 132, 136) for v in (1, 2)]
    singles += [("union", {"diagonal": 1}), ("roundtrip", {"stage_stride": 132}), ("sw128", {"b0": 1}),
                ("union", {"b0": 1})]
    variants = ("roundtrip", "movm", "pad132", "float2", "sw128", "diagonal", "union", "union_sw128", "l12")
    return kda_cases(variants, tuple(singles))


def kda_b2_cases() -> list[str]:
    """B2: the variants; other staging strides and the swizzle."""
    singles = [(v, {"stage_stride": 132}) for v in ("noalias", "kdsunion", "scalar")]
    singles += [("kdsunion", {"stage_stride": 136}), ("kdsunion", {"swizzle": 1})]
    variants = ("sinbug", "sinfix", "noalias", "scalar", "kdsunion", "nob0", "l13", "l13_16bytes", "frag", "pad136",
                "sw128", "sunion")
    return kda_cases(variants, tuple(singles))


def kda_b0_cases() -> list[str]:
    """B0 by itself."""
    return kda_cases(("b0alone", "l13", "l13_16bytes", "l12"), ())


def kda_b3_cases() -> list[str]:
    """B3: the ladder; its last rung with single steps taken back; other strides and tile layouts."""
    back = [("union", 0), ("opt7", 0), ("epilogue", 0), ("k1", 1), ("k1", 0), ("fold", 0), ("tile", 0), ("tile", 1)]
    singles = [("a1d", {name: value}) for name, value in back]
    singles += [(v, {"scratch_stride": 132}) for v in ("a1d", "fold", "vec8")]
    return kda_cases(("l6", "opt2", "l7", "fold", "vec8", "l7c", "l8", "atomics", "a1d"), tuple(singles))


KERNELS = {"transpose": transpose_cases, "hgemm_ladder": hgemm_cases, "smem_to_reg": smem_to_reg_cases,
           "kda_b1": kda_b1_cases, "kda_b2": kda_b2_cases, "kda_b0": kda_b0_cases, "kda_b3": kda_b3_cases}


# ---- how it is measured ----------------------------------------------------------------------------------------------


def output_of(*command: str, cwd: Path | None = None) -> str:
    """What ``command`` prints. :class:`SimError` with its last line of complaint when it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        complaint = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise SimError(f"{Path(command[0]).name} failed with status {done.returncode}: {complaint}")
    return done.stdout


REMEDIES = {
    "nvidia-smi": "install the NVIDIA driver: this needs a machine with a GPU",
    "nvcc": "install the CUDA toolkit and put its bin folder on PATH",
    "nvdisasm": "install the CUDA toolkit's binary utilities and put them on PATH",
    "cuobjdump": "install the CUDA toolkit's binary utilities and put them on PATH",
    "ncu": "install Nsight Compute and put ncu on PATH",
}


def require_tools(*tools: str) -> None:
    """Raise :class:`SimError` unless each of ``tools`` is on PATH, saying what to install."""
    for tool in tools:
        if not shutil.which(tool):
            raise SimError(f"{tool} not found: {REMEDIES[tool]}")


def gpu_query(field: str) -> str:
    """One field of nvidia-smi for the first GPU."""
    return output_of("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader").splitlines()[0].strip()


def architecture() -> str:
    """The first GPU's architecture, as nvcc's -arch takes it: sm_90."""
    return "sm_" + gpu_query("compute_cap").replace(".", "")


def offered(metrics: tuple[str, ...], listing: str) -> list[str]:
    """The metrics that this Nsight Compute offers for this GPU; those of the source page are never listed.

    ``listing`` is what ``ncu --query-metrics`` prints.

    >>> offered(("inst_executed", "smsp__a.sum", "smsp__b.sum"), "smsp__a    Counter    inst    a")
    ['inst_executed', 'smsp__a.sum']
    """
    names = set(re.findall(r"^(\w+)", listing, re.M))
    return [metric for metric in metrics if "__" not in metric or metric.split(".")[0] in names]


def json_lines(text: str) -> list[dict]:
    """The JSON objects a program printed, one a line, among what the profiler prints.

    >>> json_lines('==PROF== Connected\\n{"variant": "pad1"}\\n')
    [{'variant': 'pad1'}]
    """
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def merge(cases: list[str], checked: list[dict], timed: list[dict], launches: list, sites: dict) -> list[dict]:
    """One run per case: the program's own line, its time, and the profiled launch by site.

    Raises :class:`SimError` when the four lists do not tell of the same cases.
    """
    if not [line["case"] for line in checked] == [line["case"] for line in timed] == cases:
        raise SimError(f"the program reported {len(checked)} checked and {len(timed)} timed cases of {len(cases)}")
    if len(launches) != len(cases):
        raise SimError(f"the report holds {len(launches)} launches, not {len(cases)}")
    runs = []
    for line, times, launch in zip(checked, timed, launches, strict=True):
        found = by_site(launch.instructions, sites)
        run = {key: value for key, value in line.items() if key != "check"}
        run |= {"kernel": launch.kernel, "achieved_occupancy_pct": launch.totals.get(ACHIEVED), "time": times["time"]}
        run |= {key: times[key] for key in ("clocks_per_iteration",) if key in times}
        runs.append(run | {"sites": found.sites, "no_site": found.no_site, "never_active": found.never_active,
                           "totals": {name: launch.totals[name] for name in (*EXACT, *HARDWARE, *LAUNCH)
                                      if name in launch.totals}})
    return runs


def build(kernel: str, folder: Path, arch: str) -> Path:
    """Build ``kernel`` in a folder of its own in ``folder``, and return the program."""
    program = folder / kernel / kernel
    program.parent.mkdir()
    output_of("nvcc", *NVCC_FLAGS, f"-arch={arch}", "-o", str(program), str(SOURCES / f"{kernel}.cu"))
    return program


def measure(program: Path, cases: list[str], metrics: list[str]) -> list[dict]:
    """Run the cases of a built program, time and profile them, and return the runs."""
    folder = program.parent
    report = folder / f"{program.name}.ncu-rep"
    timed = json_lines(output_of(str(program), "time", *cases))
    checked = json_lines(output_of("ncu", *NCU_FLAGS, "--metrics", ",".join(metrics), "-f", "-o", str(report),
                                   str(program), "check", *cases))
    return merge(cases, checked, timed, read_report(report, lines_of(program, folder)), folder_sites(SOURCES))


def lines_of(program: Path, folder: Path) -> dict[str, dict[int, tuple[str, int]]]:
    """The line tables of the kernels in ``program``; its cubins are unpacked into ``folder``."""
    output_of("cuobjdump", "-xelf", "all", str(program), cwd=folder)
    return {name: table for cubin in sorted(folder.glob("*.cubin"))
            for name, table in line_table(output_of("nvdisasm", "-g", "-c", str(cubin))).items()}


def provenance(gpu: str, arch: str, commit: str | None) -> dict:
    """Where the numbers come from: hardware, tools, flags, sources and date."""
    if commit is None:
        commit = output_of("git", "-C", str(SOURCES), "rev-parse", "HEAD").strip()
    return {
        "gpu": gpu_query("name"), "gpu_id": gpu, "driver": gpu_query("driver_version"),
        "ncu": output_of("ncu", "--version").strip().splitlines()[-1],
        "nvcc": output_of("nvcc", "--version").strip().splitlines()[-1],
        "flags": {"nvcc": [*NVCC_FLAGS, f"-arch={arch}"], "ncu": list(NCU_FLAGS)},
        "commit": commit, "date": datetime.now(timezone.utc).date().isoformat(),
        "sources": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(SOURCES.glob("*.cu*"))},
    }


def write_atomically(path: Path, document: dict) -> None:
    """Write ``document`` as JSON, a run a line: a reader sees the old file or the new one, never half of one."""
    head = json.dumps({key: value for key, value in document.items() if key != "runs"}, indent=1)
    runs = ",\n".join(json.dumps(run) for run in document["runs"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(f'{head[:-2]},\n "runs": [\n{runs}\n]}}\n')
    os.replace(file.name, path)


def chosen_cases(kernels: tuple[str, ...], only: str | None, out: Path) -> dict[str, list[str]]:
    """The cases to measure of each kernel, those that match ``only`` if given.

    Raises :class:`SimError` for a bad expression, one that matches no case, and a part that would replace a file in
    ``out``: what is there may be whole.
    """
    try:
        cases = {kernel: [text for text in KERNELS[kernel]() if re.search(only or "", text)] for kernel in kernels}
    except re.error as error:
        raise SimError(f"--only {only!r} is not a regular expression: {error}") from None
    for kernel, texts in cases.items():
        if not texts:
            raise SimError(f"--only {only!r} matches no case of {kernel}, such as {KERNELS[kernel]()[0]!r}")
        if only and (out / f"{kernel}.json").exists():
            raise SimError(f"{out / kernel}.json exists; --only would replace it by a part: give another --out")
    return cases


@click.command()
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("--gpu", default="h200", show_default=True, help="the GPU's name in models/gpus, noted in the result")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="folder for KERNEL.json")
@click.option("--only", metavar="REGEX", help="only the cases that match; never over a whole KERNEL.json")
@click.option("--commit", help="noted in the result; default: git's HEAD")
def main(kernels: tuple[str, ...], gpu: str, out: Path, only: str | None, commit: str | None) -> None:
    """Measure each KERNEL (default: all) on this machine's GPU."""
    try:
        if unknown := set(kernels) - set(KERNELS):
            raise SimError(f"unknown kernel {min(unknown)!r} (known: {', '.join(KERNELS)})")
        chosen = chosen_cases(kernels or tuple(KERNELS), only, out)
        require_tools(*REMEDIES)
        arch = architecture()
        metrics = offered((*EXACT, *HARDWARE), output_of("ncu", "--query-metrics"))
        origin = provenance(gpu, arch, commit)
    except SimError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    failed = False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        # Built side by side, then measured one after the other; one that fails leaves the others their turn.
        programs = {kernel: pool.submit(build, kernel, Path(folder), arch) for kernel in chosen}
        wait(programs.values())
        for kernel, program in programs.items():
            try:
                runs = measure(program.result(), chosen[kernel], metrics)
            except SimError as error:
                failed = True
                click.echo(f"{kernel}: error: {error}", err=True)
                continue
            write_atomically(out / f"{kernel}.json", {"kernel": kernel, "provenance": origin, "runs": runs})
            click.echo(f"{kernel}: {len(runs)} runs")
            for where in sorted({where for run in runs for where in run["no_site"]}):
                click.echo(f"{kernel}: memory instructions without a site at {where}", err=True)
    if failed:
        sys.exit(2)


if __name__ == "__main__":
    main()
