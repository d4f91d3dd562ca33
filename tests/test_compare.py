"""``simgpu compare`` on what ncu 2025.3 printed of transpose@plain, 1024x1024, on an H200, trimmed to fewer columns."""

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from simgpu.cli import main
from simgpu.errors import SimError
from validation.ncu_csv import count, read_profiles

KERNEL = "void transpose<(Variant)0>(const float *, float *, int, int)"
SOURCE_COLUMNS = ("Instructions Executed", "L1 Wavefronts Shared Excessive", "L1 Wavefronts Shared",
                  "L1 Wavefronts Shared Ideal", "L2 Theoretical Sectors Global", "L2 Theoretical Sectors Global Ideal",
                  "L1 Tag Requests Global")
GLOBAL, STORE = (8192, 0, 0, 0, 32768, 32768, 8192), (8192, 0, 8192, 8192, 0, 0, 0)
LOAD = (8192, 253952, 262144, 8192, 0, 0, 0)
LINES = {  # source line: its text, the counts of each memory instruction, and their texts
    29: ("LDG32(word, src + row * cols + col);                   // @site src.load", GLOBAL,
         ("@!P1  LDG.E R12, desc[UR6][R12.64]", "@!P3  LDG.E R8, desc[UR6][R8.64]",
          "@!P4  LDG.E R5, desc[UR6][R4.64]", "@!P0  LDG.E R6, desc[UR6][R6.64]")),
    30: ("STS32(base + 4 * tile_word<V>(ty + j, tx), word);      // @site tile.store", STORE,
         ("@!P1  STS [R11], R12", "@!P3  STS [R9+0x400], R8",
          "@!P4  STS [R18+0x800], R5", "@!P0  STS [R15+0xc00], R6")),
    39: ("LDS32(word, base + 4 * tile_word<V>(tx, ty + j));      // @site tile.load", LOAD,
         ("      LDS R5, [R5]", "      LDS R5, [R5+0x20]", "      LDS R5, [R5+0x40]", "      LDS R5, [R5+0x60]")),
    40: ("STG32(dst + row * rows + col, word);                   // @site dst.store", GLOBAL,
         ("      STG.E desc[UR6][R8.64], R5", "      STG.E desc[UR6][R8.64], R5", "      STG.E desc[UR6][R6.64], R5",
          "      STG.E desc[UR6][R2.64], R5")),
}
OTHER = ("      LDC R1, c[0x0][0x28]", (8192, 0, 0, 0, 0, 0, 0))
PADDING = ("@!PT LDS RZ, [RZ]", (576, 0, 0, 0, 0, 0, 0))  # the compiler's: a predicate that never holds
RAW = {  # metric: unit, value as printed
    "memory_l1_wavefronts_shared": ("sectors", "1081344"),
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": ("", "1,048,576"),
    "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum": ("", "32,768"),
    "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ld.sum": ("sector", "131072.000000"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": ("", "1,015,811"),
}
SETTINGS = ("--set", "rows=1024", "--set", "cols=1024")


def printed(rows):
    """Rows as ncu prints them: every cell quoted."""
    buffer = io.StringIO()
    csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def sass_page(times=2, lines=LINES):
    section = [("Kernel Name", KERNEL, ""), ("Address", "Source", "# Samples", *SOURCE_COLUMNS)]
    texts = [OTHER, PADDING, *((text, counts) for _, counts, texts in lines.values() for text in texts)]
    section += [(f"0x7f59077a{16 * n:04x}", text, "3", *counts) for n, (text, counts) in enumerate(texts)]
    return printed(section * times)


def cuda_page(lines=LINES):
    rows = [("File Path", "transpose.cu"), ("Function Name", KERNEL),
            ("Line No", "Source", "Address", "Source", "# Samples", *SOURCE_COLUMNS)]
    for line, (source, counts, texts) in lines.items():
        rows.append((line, source, "-", "-", "9", "229376", *(len(texts) * number for number in counts[1:])))
        rows.append(("", "", f"0x7f5907000{line:03x}", "@!P1  IMAD R15, R4, UR9, RZ", "0", *OTHER[1]))
        rows.append(("", "", f"0x7f5907001{line:03x}", PADDING[0], "0", *PADDING[1]))
        rows += [("", "", f"0x7f5907{line % 100:03x}{n:03x}", text, "1", *counts) for n, text in enumerate(texts)]
        rows.append(("", "", "...", "...", *"-" * 8))
    return printed(rows)


def raw_page(metrics=RAW, grid="(32, 32, 1)", launches=1):
    head = ("ID", "Process ID", "Process Name", "Kernel Name", "Block Size", "Grid Size", "CC")
    rows = [(*head, *metrics), (*[""] * len(head), *(unit for unit, _ in metrics.values()))]
    rows += [(n, "473", "app", KERNEL, "(32, 8, 1)", grid, "9.0", *(value for _, value in metrics.values()))
             for n in range(launches)]
    return "==PROF== Connected to process 473 (app)\n" + printed(rows) + "==PROF== Disconnected\n"


@pytest.fixture
def compare(tmp_path):
    def run(page, *options, kernel="transpose@plain", settings=SETTINGS):
        file = tmp_path / "ncu.csv"
        file.write_bytes(page if isinstance(page, bytes) else page.encode())
        return CliRunner().invoke(main, ["compare", kernel, "--ncu", str(file), *settings, *options])
    return run


def numbers(result):
    return {(row["site"], row["column"]): row for row in json.loads(result.stdout)["numbers"]}


# ---- pages that match ------------------------------------------------------------------------------------------------


def test_source_lines_are_compared_by_site(compare):
    result = compare(cuda_page(), "--format", "json")
    found = numbers(result)
    assert result.exit_code == 0 and len(found) == 16
    assert found["tile.load", "excessive"]["measured"] == found["tile.load", "excessive"]["predicted"] == 1_015_808
    assert {row["verdict"] for row in found.values()} == {"equal"}


def test_the_page_beside_this_file_is_this_one():
    assert (Path(__file__).parent / "transpose.csv").read_text(encoding="utf-8") == cuda_page()


def test_an_instruction_inlined_from_another_line_counts_once_and_at_its_site(compare):
    inlined = {line: ("asm volatile(...)", counts, texts) for line, (_, counts, texts) in LINES.items()}
    for first, second in ((LINES, inlined), (inlined, LINES)):
        two_files = cuda_page(first) + cuda_page(second).replace('"transpose.cu"', '"common.cuh"')
        one_file = cuda_page(first | {line + 100: entry for line, entry in second.items()})
        for page in (two_files, one_file):
            result = compare(page, "--format", "json")
            assert result.exit_code == 0 and len(numbers(result)) == 16


@pytest.mark.parametrize("times", (1, 2))
def test_sass_alone_is_compared_by_class_and_a_repeated_section_counts_once(compare, times):
    result = compare(sass_page(times), "--format", "json")
    found = numbers(result)
    assert result.exit_code == 0
    assert {site for site, _ in found} == {"LDG", "STS", "LDS", "STG"}
    assert found["LDS", "wavefronts"]["measured"] == 1_048_576
    assert any("by class of instruction" in note for note in json.loads(result.stdout)["notes"])


def test_raw_page_shows_hardware_counters_that_do_not_decide_and_what_was_not_collected(compare):
    result = compare(raw_page(), "--format", "json")
    found = numbers(result)
    assert result.exit_code == 0
    assert found["(whole launch)", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"]["verdict"] == "shown"
    store = "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_st.sum"
    assert any(store in note and "ncu --metrics" in note for note in json.loads(result.stdout)["notes"])


def test_a_row_per_metric_and_utf_16_are_read_too(compare):
    head = ("ID", "Kernel Name", "Block Size", "Grid Size", "Section Name", "Metric Name", "Metric Unit",
            "Metric Value", "Rule Name", "Rule Description")
    rows = [("0", KERNEL, "(32, 8, 1)", "(32, 32, 1)", "Command line profiler metrics", name, unit, value)
            for name, (unit, value) in RAW.items()]
    result = compare(printed([head, *rows]).encode("utf-16"), "--format", "json")
    assert result.exit_code == 0 and len(numbers(result)) == len(RAW)


# ---- pages that differ -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", (cuda_page, sass_page))
def test_one_wavefront_more_is_a_difference(compare, page):
    source, counts, texts = LINES[39]
    wrong = LINES | {39: (source, (counts[0], counts[1], counts[2] + 1, *counts[3:]), texts)}
    result = compare(page(lines=wrong))
    assert result.exit_code == 1 and "1,048,580" in result.stdout and "1 different" in result.stdout


def test_a_site_the_twin_lacks_and_one_the_profile_lacks_are_differences(compare):
    source, counts, texts = LINES[39]
    renamed = LINES | {39: (source.replace("tile.load", "tile.read"), counts, texts)}
    found = numbers(compare(cuda_page(renamed), "--format", "json"))
    assert found["tile.read", "executed"]["predicted"] is None and found["tile.load", "executed"]["measured"] is None
    assert [row["verdict"] for (site, _), row in found.items() if site.startswith("tile.rea")] == ["different"]


def test_another_variant_differs_in_shared_memory_only(compare):
    result = compare(cuda_page(), "--format", "json", kernel="transpose@pad1")
    wrong = {site for (site, _), row in numbers(result).items() if row["verdict"] == "different"}
    assert result.exit_code == 1 and wrong == {"tile.load"}


def test_more_executed_than_predicted_and_nothing_else_is_explained_in_a_note(compare):
    source, counts, texts = LINES[29]
    result = compare(cuda_page(LINES | {29: (source, (8200, *counts[1:]), texts)}))
    assert result.exit_code == 1 and "only the executed count differs at src.load" in result.stdout


def test_a_wrong_exact_metric_of_the_raw_page_is_a_difference(compare):
    name = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
    assert compare(raw_page(RAW | {name: ("", "1,048,577")})).exit_code == 1


# ---- pages that are refused ------------------------------------------------------------------------------------------


def refused(result, *words):
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr and len(result.stderr.splitlines()) == 1
    for word in words:
        assert word in result.stderr


def test_another_kernel_is_refused_with_the_launches_there_are(compare):
    refused(compare(raw_page(), kernel="patterns@stride4", settings=()), "no launch of 'patterns'", KERNEL)


def test_a_kernel_may_be_named_like_the_twins_device_function(compare):
    ladder = {"kernel": "hgemm_ladder@A3", "settings": ("--set", "m=128", "--set", "n=128", "--set", "k=64")}
    for name, read in (("hgemm<1, 1, 0>(int)", True), ("my_hgemm2(int)", False)):
        page = raw_page(grid="(1, 1, 1)").replace(KERNEL, name).replace("(32, 8, 1)", "(256, 1, 1)")
        result = compare(page, **ladder)
        assert (result.exit_code == 1) if read else ("no launch of 'hgemm_ladder'" in result.stderr)


def test_another_size_is_refused(compare):
    refused(compare(raw_page(grid="(64, 64, 1)")), "(64, 64, 1)", "(32, 32, 1)", "--set")


def test_several_launches_ask_for_one_and_take_it(compare):
    page = raw_page(launches=3)
    refused(compare(page), "3 launches", "--launch")
    assert compare(page, "--launch", "2").exit_code == 0
    refused(compare(page, "--launch", "4"), "no launch 4")


@pytest.mark.parametrize("value", ("1.048.576", "1 048 576", "1 048 576", "1'048'576", "1048576,0", "1.048", "1.000"))
def test_numbers_of_another_locale_are_refused(compare, value):
    name = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
    refused(compare(raw_page(RAW | {name: ("", value)})), value.replace(" ", " ")[:5], "LC_ALL=C", name)


def test_semicolons_of_another_locale_are_refused(compare):
    refused(compare(raw_page().replace('","', '";"')), "';'")


def test_scaled_units_are_refused(compare):
    name = "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_ld.sum"
    refused(compare(raw_page(RAW | {name: ("Ksector", "131.07")})), "Ksector", "--print-units base")


@pytest.mark.parametrize("page", (raw_page, sass_page, cuda_page))
@settings(deadline=None)
@given(part=st.floats(0.02, 0.98))
def test_a_page_cut_within_a_row_is_refused(tmp_path_factory, page, part):
    whole = page().removesuffix("==PROF== Disconnected\n")
    cut = whole[: int(len(whole) * part)]
    if cut.endswith("\n") or whole[len(cut)] == "\n":
        return  # between two rows: nothing tells that more followed
    file = tmp_path_factory.mktemp("cut") / "ncu.csv"
    file.write_text(cut)
    with pytest.raises(SimError):
        read_profiles(file)


def test_a_second_printing_that_ends_early_is_a_cut_file(compare):
    lines = sass_page(2).splitlines(keepends=True)
    refused(compare("".join(lines[:-3])), "the file is cut")


def test_missing_columns_and_pages_of_another_kind_are_refused(compare):
    page = cuda_page().replace("Instructions Executed", "Something")
    refused(compare(page), "instructions executed", "ncu --section")
    refused(compare(raw_page({"gpu__time_duration.sum": ("us", "12.3")})), "none of the metrics", "ncu --metrics")
    refused(compare("time,value\n1,2\n"), "neither a raw nor a source page")
    refused(compare(b"\xff\x00\xfe"), "ncu.csv")
    refused(CliRunner().invoke(main, ["compare", "transpose", "--ncu", "/nonexistent.csv"]), "/nonexistent.csv")


@given(st.integers(0, 10**15))
def test_a_count_reads_back_with_and_without_separators(number):
    assert count(f"{number}", "x") == count(f"{number:,}", "x") == count(f"{number}.000000", "x") == number
