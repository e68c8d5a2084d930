"""The experts of one token on a GPU, from the router's logits to the residual stream, in two launches.

Each block chooses for itself (zse.kernels.gpu.router). That takes less than what it replaces, one block's choice that
others wait for and then read. Where experts have places on the device by turns (zse.kernels.gpu.expert_slots), tasks
name them: what is chosen and computed is the same.

`gate_up_chosen` multiplies one expert's gate and up, as zse.kernels.gpu.experts does, and leaves act(gate) * up times
the expert's weight, so that what follows is one sum. `down_chosen` makes that sum over all experts of a tile of 16 rows
and adds it to the stream. Lanes 0 to 15 of a warp have one expert's tile and lanes 16 to 31 the next one's: of the eight
columns of a mma four belong to each, so that the columns of tokens that there are not serve. It needs nothing but the
logits for its choice, which are there when it starts (gate_up_chosen lets it start only behind its own grid_wait()),
and has its first weights in shared memory before what they are multiplied with is there."""

from typing import Any

from zse import kernel as zl
from zse.kernels.gpu import experts
from zse.kernels.gpu import matmul_forms as forms
from zse.kernels.gpu import matmul_small as small
from zse.kernels.gpu import matmul_tiles as tiles
from zse.kernels.gpu.r16 import table_of
from zse.kernels.gpu.router import CHOICE_BYTES, choose, weight_of
from zse.kernels.op import check, require
from zse.kernels.route import MAX_CHOSEN
from zse.runtime.args import Args

DOWN_SIZES = ((12, 2), (12, 1), (8, 1), (4, 1))  # of down_chosen: warps of a block, blocks of a multiprocessor


class ChosenParams(tiles.ProductParams):
    """tokens: 1; rows: of an expert; bias [experts, rows]. logits f32 [experts]; select f32 [experts], added for the
    choice of `chosen` experts; gating: of GATINGS; weights are perhaps divided by their sum + sum_eps, times factor. a and
    out: bf16 [width] and bf16 [chosen, rows / 2]; of down_chosen bf16 [chosen, width] and f32 [rows]. tasks i32 [chosen, 3],
    with has_tasks: whose first numbers are the chosen experts' places in the stacks, in the order of experts."""

    logits: zl.Ptr[zl.f32, "const"]
    select: zl.Ptr[zl.f32, "const"]
    tasks: zl.Ptr[zl.i32, "const"]
    experts: zl.i32
    chosen: zl.i32
    gating: zl.i32
    has_select: zl.i32
    has_tasks: zl.i32
    normalize: zl.i32
    sum_eps: zl.f32
    factor: zl.f32


class Lut4ChosenParams(ChosenParams):
    """table0 .. 3: as of zse.kernels.gpu.matmul_tiles.Lut4ProductParams."""

    table0: zl.u32
    table1: zl.u32
    table2: zl.u32
    table3: zl.u32


@zl.kernel
def gate_up_chosen(params: ChosenParams):
    """Grid (blocks that share the units of an expert, chosen experts)."""
    multiply_expert(params, None)


@zl.kernel
def gate_up_chosen_lut4(params: Lut4ChosenParams):
    """Likewise."""
    multiply_expert(params, table_of(params))


@zl.inline
def multiply_expert(params, table):
    """The body of a kernel."""
    WARPS = zl.target.threads // 32
    nbytes = tiles.slot_bytes(params.KIND, params.GROUP, params.CHUNK)
    ring = zl.shared_array(zl.u8, WARPS * params.STAGES * nbytes, align=128)
    sums = zl.shared_array(zl.f32, tiles.sums_bytes(WARPS, 1, 1) // 4)
    lane, warp, which = zl.lane_index(), zl.warp_index(), zl.block_index(1)
    factor = [zl.f32(0)]
    zl.grid_wait()
    places = zl.shared_array(zl.i32, MAX_CHOSEN)
    found = choose(params, places)
    w, high, scale, offset, bias = experts.planes_of(params, zl.i64(places[which]))
    p = tiles.BlockProduct(
        **tiles.shifted(params, tiles.ProductParams, w=w, high=high, scale=scale, offset=offset, bias=bias),
        gated=zl.i32(1),
        first_token=which,
        here=zl.i32(1),
        lane=lane,
        warp=warp,
        chunks=(params.width + (params.CHUNK - 1)) // params.CHUNK,
        units=params.rows // 32,
        ring=ring + warp * (params.STAGES * nbytes),
        sums=sums,
        WARPS=WARPS,
        TOKENS=1,
        table=table,
        BUFFERS=1,
        CLAMPS=True,
        factor=factor,
        ROLLED=True,
    )
    following, at = tiles.start(p)
    if warp == 0:  # which finishes all units
        tiles.fetch_ends(p)
        factor[0] = zl.shuffle(weight_of(params, found, lane), which)
    b = [zl.u32(0) for _ in zl.static(range(p.CHUNK // 8))]
    tiles.stream(p, following, at, 8, (small.load_tokens, b, p.a, p), (small.multiply, b, p), (small.leave, p))


class SummedProduct(tiles.BlockProduct):
    """What a block of down_chosen computes: `unit` of 16 rows, of the experts at `places`, two at a time."""

    params: Any
    places: Any
    unit: Any
    half: Any  # which of two experts is this lane's


@zl.inline
def move_on(place, steps, p):
    """place: [two experts, chunk]."""
    place[1] += steps
    while place[1] >= p.chunks:
        place[1] -= p.chunks
        place[0] += 1


@zl.inline
def copy_place(slot, place, p):
    """Start the copies of this lane's expert's weights at a place, if there is one, and move it on."""
    if place[0] * 2 < p.params.chosen:
        expert = zl.i64(p.places[min(place[0] * 2 + p.half, p.params.chosen - 1)])
        w, high, scale, offset, _ = experts.planes_of(p.params, expert)
        mine = tiles.BlockProduct(**tiles.shifted(p, tiles.BlockProduct, w=w, high=high, scale=scale, offset=offset))
        at = [w + 0 for _ in zl.static(range(tiles.num_pointers(p)))]
        tiles.point(at, mine, p.unit, place[1])
        tiles.copy_chunk(slot, at, mine, p.unit, place[1])
        move_on(place, p.WARPS, p)
    zl.copy_commit()


@zl.inline
def bias_of(p, weight):
    """What the chosen experts' biases add to row `lane` of the tile. weight: of the lane's expert."""
    total, row = zl.f32(0), zl.i64(p.unit * 16 + p.lane % 16)
    for j in zl.unroll(range(p.params.chosen), 1):
        total = zl.fma(p.params.bias[zl.i64(p.places[j]) * p.rows + row], zl.shuffle(weight, j), total)
    return total


@zl.inline
def finish_sum(p, before):
    """Add the warps' sums of both halves in order, and the tile's rows to the stream."""
    r = zl.thread_index()
    if r < 16:
        total = zl.f32(0)
        for warp in zl.static(range(p.WARPS)):
            total += p.sums[warp * 32 + r] + p.sums[warp * 32 + 16 + r]
        p.out[p.unit * 16 + r] = before + total


@zl.kernel
def down_chosen(params: ChosenParams):
    """Grid (tiles of 16 rows)."""
    add_experts(params, None)


@zl.kernel
def down_chosen_lut4(params: Lut4ChosenParams):
    """Likewise."""
    add_experts(params, table_of(params))


@zl.inline
def add_experts(params, table):
    """The body of a kernel."""
    zl.grid_launch_dependents()
    WARPS, STAGES = zl.target.threads // 32, params.STAGES
    nbytes = tiles.slot_bytes(params.KIND, params.GROUP, params.CHUNK)
    ring = zl.shared_array(zl.u8, WARPS * STAGES * nbytes, align=128)
    sums = zl.shared_array(zl.f32, WARPS * 32)
    places = zl.shared_array(zl.i32, MAX_CHOSEN)
    lane, warp, unit = zl.lane_index(), zl.warp_index(), zl.block_index(0)
    found = choose(params, places)
    p = SummedProduct(
        **tiles.shifted(params, tiles.ProductParams),
        gated=zl.i32(0),
        first_token=zl.i32(0),
        here=zl.i32(1),
        lane=lane,
        warp=warp,
        chunks=(params.width + (params.CHUNK - 1)) // params.CHUNK,
        units=params.rows // 16,
        ring=ring + warp * (STAGES * nbytes),
        sums=sums,
        WARPS=WARPS,
        TOKENS=1,
        table=table,
        HALVES=True,
        params=params,
        places=places,
        unit=unit,
        half=lane // 16,
    )
    following, here = [zl.i32(0), zl.i32(0)], [zl.i32(0), zl.i32(0)]
    move_on(following, warp, p)
    move_on(here, warp, p)
    for s in zl.unroll(range(STAGES - 1), 1):
        copy_place(p.ring + s * nbytes, following, p)
    more = zl.f32(0)
    if p.has_bias != 0 and warp == 0:  # which finishes
        more = bias_of(p, weight_of(params, found, lane))
    zl.grid_wait()
    before = p.out[unit * 16 + lane % 16] + more
    acc = [zl.f32(0) for _ in zl.static(range(8))]
    b = [zl.u32(0) for _ in zl.static(range(p.CHUNK // 8))]
    slot = zl.i32(0)
    while here[0] * 2 < params.chosen:
        mine = here[0] * 2 + p.half
        small.load_tokens(unit, here[1], b, p.a + zl.i64(min(mine, params.chosen - 1)) * p.width, p)
        if here[0] * 2 + 1 == params.chosen:  # the second half has no expert
            for i in zl.static(range(p.CHUNK // 8)):
                b[i] = b[i] if mine < params.chosen else zl.u32(0)
        zl.copy_wait(STAGES - 2)
        zl.warp_barrier()
        free = slot - 1 if slot > 0 else zl.i32(STAGES - 1)
        copy_place(p.ring + free * nbytes, following, p)
        small.multiply(acc, p.ring + slot * nbytes, here[1], b, p)
        slot = slot + 1 if slot < STAGES - 1 else zl.i32(0)
        move_on(here, WARPS, p)
    if lane % 4 == p.half * 2:  # column 0 is the first expert's, column 4 the second one's
        four = zl.make_vector(acc[0], acc[2], acc[4], acc[6])
        if p.KIND in small.REST:
            four = four * small.REST[p.KIND]
        zl.store(sums + (warp * 32 + lane // 4 * 4), four)
    zl.barrier()
    finish_sum(p, before)


def down_ring(form: tuple[str, int], arch: int) -> tuple[int, int, int]:
    """(warps, slots of a ring, blocks of a multiprocessor) of down_chosen."""
    slot = tiles.slot_bytes(*form, forms.FORMS[form])
    for warps, blocks in DOWN_SIZES:
        room = forms.shared_bytes(arch) // blocks - forms.BLOCK_BYTES - CHOICE_BYTES - warps * 128
        if (stages := room // (warps * slot)) >= 3:
            return warps, min(stages, 4), blocks
    raise AssertionError(form)


def variants(target) -> list[zl.Variant]:
    """Both kernels for each form of weights."""
    if not target.has("mma_sync"):
        return []
    made = []
    for form, chunk in forms.FORMS.items():
        statics = {"KIND": form[0], "GROUP": form[1], "CHUNK": chunk}
        is_lut4 = form[0] == "lut4"
        warps, stages, blocks = forms.experts_ring(form, target.arch, CHOICE_BYTES)
        kernel = gate_up_chosen_lut4 if is_lut4 else gate_up_chosen
        symbol = forms.symbol_of(form, "gate_up_chosen")
        made.append(zl.Variant(symbol, kernel, statics | {"STAGES": stages}, threads=32 * warps, min_blocks=blocks))
        warps, stages, blocks = down_ring(form, target.arch)
        kernel = down_chosen_lut4 if is_lut4 else down_chosen
        symbol = forms.symbol_of(form, "down_chosen")
        made.append(zl.Variant(symbol, kernel, statics | {"STAGES": stages}, threads=32 * warps, min_blocks=blocks))
    return made


def _product_args(a, weight, bias, out, rows: int, mode: int, choice: dict[str, Any]) -> tuple[Args, tuple[str, int]]:
    """What both kernels take, and the form of the weight. rows: of an expert."""
    (stacked, width), scheme = weight.shape, weight.scheme
    stack = choice["experts"] * rows  # of places there may be more or fewer
    require(stacked == stack or choice["has_tasks"] and stacked % rows == 0, f"one_token: {stacked} rows, not {stack}")
    require(weight.layout == scheme.in_memory["gpu"] and scheme.fits(width), f"one_token: {scheme} in {weight.layout}")
    if bias is not None:
        check("one_token bias", bias, "f32", stacked)
    form = forms.form_of(scheme, width)
    args = Args(
        w=weight.planes[scheme.numbers],
        high=weight.planes.get("high"),
        scale=weight.planes.get("scale"),
        offset=weight.planes.get("offset"),
        a=a,
        bias=bias,
        out=out,
        tokens=1,
        rows=rows,
        width=width,
        groups=scheme.groups(width),
        shift=forms.shift_of(scheme, width, form),
        symmetric=int(scheme.symmetric),
        scaling=scheme.scale_code,
        has_bias=int(bias is not None),
        mode=mode,
    )
    args |= choice | (scheme.table_args() if form[0] == "lut4" else {})
    return args, form


def launch_gate_up(recorder, a, weight, bias, made, mode: int, choice: dict[str, Any]) -> None:
    """a bf16 [1, H]; made bf16 [chosen, I]. mode: of zse.kernels.gpu.matmul_tiles; choice: the choice's parameters."""
    chosen, inner = made.shape
    args, form = _product_args(a, weight, bias, made, 2 * inner, mode, choice)
    unit = max(weight.scheme.row_unit, 16)
    require(inner % unit == 0, f"one_token: {inner} rows of gates; multiples of {unit}")
    slots = recorder.device.num_sms * forms.experts_ring(form, recorder.device.arch, CHOICE_BYTES)[2]
    recorder.launch(
        forms.symbol_of(form, "gate_up_chosen"), args, (experts.blocks_of(inner // 16, chosen, slots), chosen)
    )


def launch_down(recorder, made, weight, bias, x, choice: dict[str, Any]) -> None:
    """made bf16 [chosen, I]; x f32 [1, H], which is added to."""
    rows = x.shape[1]
    args, form = _product_args(made, weight, bias, x, rows, tiles.ACCUMULATE, choice)
    unit = max(weight.scheme.row_unit, 16)
    require(rows % unit == 0, f"one_token: {rows} rows; multiples of {unit}")
    recorder.launch(forms.symbol_of(form, "down_chosen"), args, (rows // 16,))
