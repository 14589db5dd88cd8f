// A whole decoded step: with few heads, which one block serves, and with many, which have a launch of their own; rows of
// shared pages; what the launchers refuse; calls that the device refuses for want of pages, which change nothing.
#include "sanitized.h"

#include <array>

namespace {

constexpr int64_t P = 2, BLOCKS = 3, ROTARY = 8, POSITIONS = 12, SHARED = 3;  // slots of every row

// R rows of 3 slots that all name pages 0 and 1: each takes a copy of the second. `spare` pages are free.
struct pool {
    int64_t pages;
    size_t bytes;  // of all keys
    std::vector<int32_t> table, lengths, refs, free_list, free_count;
    array k, v;

    pool(int64_t R, int64_t spare, int64_t D, kvc_dtype dtype)
        : pages(2 + spare), bytes(static_cast<size_t>(pages * P * D * bytes_of(dtype))), table(static_cast<size_t>(R * BLOCKS), -1), lengths(static_cast<size_t>(R), SHARED),
          refs(static_cast<size_t>(pages), 0), free_list(static_cast<size_t>(pages), -1), free_count{0, 0},
          k(pages * P * D, dtype), v(pages * P * D, dtype) {
        for (size_t r = 0; r < lengths.size(); r++) table[r * BLOCKS] = 0, table[r * BLOCKS + 1] = 1;
        refs[0] = refs[1] = static_cast<int32_t>(R);
        for (int64_t i = 0; i < spare; i++) free_list[static_cast<size_t>(i)] = static_cast<int32_t>(2 + i);
        free_count[0] = static_cast<int32_t>(spare);
    }
    kvc_page_table view() {
        return {table.data(), lengths.data(), refs.data(), free_list.data(), free_count.data(),
                static_cast<int64_t>(lengths.size()), BLOCKS, P, pages};
    }
    // Nothing but the note of one refused call differs from what a pool begins with.
    void expect_unchanged(const pool& before, const char* what) const {
        expect_true(table == before.table && lengths == before.lengths && refs == before.refs &&
                        free_list == before.free_list && free_count[0] == before.free_count[0] && free_count[1] == 1 &&
                        !std::memcmp(k.bytes.get(), before.k.bytes.get(), bytes) &&
                        !std::memcmp(v.bytes.get(), before.v.bytes.get(), bytes),
                    what, pages);
    }
};

}  // namespace

void run_paged_step(int64_t B, int64_t Hkv, int64_t S, int64_t D, kvc_dtype dtype) {
    const int64_t Hq = 2 * Hkv, R = B * Hkv;
    array q(B, Hq, S, D, dtype), k(B, Hkv, S, D, dtype), v(B, Hkv, S, D, dtype), out(B * Hq * S * D, dtype),
        lse(B * Hq * S, KVC_F32), cos(POSITIONS * ROTARY / 2, KVC_F32), sin(POSITIONS * ROTARY / 2, KVC_F32);
    const std::vector<int32_t> shift(static_cast<size_t>(R), 1), begin(static_cast<size_t>(R), 1);
    pool full(R, 2 * R, D, dtype), empty(R, R - 1, D, dtype), before(R, R - 1, D, dtype);
    kvc_paged_step_args args = {{out.bytes.get(), lse.floats(), q.view(), k.view(), v.view(),
                                 rows_of(full.k, full.v, dtype), full.view(), cos.floats(), sin.floats(), nullptr, B, Hq, Hkv,
                                 S, D, ROTARY, POSITIONS, 0.3f, 0.0f, nullptr}, shift.data(), begin.data()};
    const scratch_memory scratch = scratch_of(kvc_cuda_paged_step_scratch_bytes(&args));
    args.step.scratch = scratch.get();
    expect(kvc_cuda_paged_step(&args, nullptr), "paged_step", D);
    expect_true(full.free_count[1] == 0 && full.lengths.back() == SHARED + S && full.table[1] != 1, "paged_step's rows", D);
    args.shift = args.begin = nullptr, args.step.table_rows = 3;  // positions outside
    for (int i = 0; i < 3; i++) expect(kvc_cuda_paged_step(&args, nullptr), "paged_step until full", D);
    expect_true(full.free_count[1] > 0 || S == 1, "paged_step past the table", D);
    kvc_paged_step_args short_of = args;
    short_of.step.table = empty.view(), short_of.step.rows = rows_of(empty.k, empty.v, dtype);
    expect(kvc_cuda_paged_step(&short_of, nullptr), "paged_step without pages", D);
    empty.expect_unchanged(before, "paged_step without pages");
    expect_refused(kvc_cuda_paged_step, args, "paged_step of wrong arguments", [](auto& a) { a.step.D = 513; },
                   [](auto& a) { a.step.D = 0; }, [](auto& a) { a.step.table.R++; }, [](auto& a) { a.step.table.P = 3; },
                   [](auto& a) { a.step.rotary_dim = 3; }, [](auto& a) { a.step.Hq++; }, [](auto& a) { a.step.scale = NAN; },
                   [](auto& a) { a.step.softcap = -1.0f; }, [](auto& a) { a.step.S = -1; }, [](auto& a) { a.step.out = nullptr; },
                   [](auto& a) { a.step.lse = nullptr; }, [](auto& a) { a.step.rows.keys = nullptr; }, [](auto& a) { a.step.cos = nullptr; },
                   [](auto& a) { a.step.scratch = nullptr; }, [](auto& a) { a.step.table.lengths = nullptr; },
                   [](auto& a) { a.step.v.dtype = a.step.k.dtype == KVC_F32 ? KVC_F16 : KVC_F32; });
    args.step.S = 0;
    expect(kvc_cuda_paged_step(&args, nullptr), "paged_step of no tokens", D);
    expect_true(kvc_cuda_paged_step_scratch_bytes(&args) == 0, "scratch of paged_step of no tokens", D);
}

void run_quest_step(int64_t B, int64_t Hkv, int64_t G, int64_t D, int64_t pages_read, int64_t length, kvc_dtype dtype) {
    const int64_t Hq = G * Hkv, R = B * Hkv, blocks = length / P + 2, pages = blocks * R;
    const int64_t width = pages_read < blocks ? pages_read : blocks;
    array q(B, Hq, 1, D, dtype), k(B, Hkv, 1, D, dtype), v(B, Hkv, 1, D, dtype), out(B * Hq * D, dtype), lse(B * Hq, KVC_F32),
        cos((length + 2) * ROTARY / 2, KVC_F32), sin((length + 2) * ROTARY / 2, KVC_F32), k_pages(pages * P * D, dtype),
        v_pages(pages * P * D, dtype), ranges(R * blocks * 2 * D, dtype);
    std::vector<int32_t> table(static_cast<size_t>(R * blocks), -1), lengths(static_cast<size_t>(R), static_cast<int32_t>(length)),
        refs(static_cast<size_t>(pages), 1), free_pages(static_cast<size_t>(pages), -1), free_count{static_cast<int32_t>(R), 0},
        chosen(static_cast<size_t>(R * width), 99);
    const int64_t held = (length + P - 1) / P;
    for (int64_t r = 0; r < R; r++) {
        for (int64_t i = 0; i < held; i++) table[static_cast<size_t>(r * blocks + i)] = static_cast<int32_t>(r * held + i);
        free_pages[static_cast<size_t>(r)] = static_cast<int32_t>(R * held + r);
        refs[static_cast<size_t>(R * held + r)] = 0;
    }
    kvc_quest_step_args args = {};
    args.step = {out.bytes.get(), lse.floats(), q.view(), k.view(), v.view(), rows_of(k_pages, v_pages, dtype),
                 {table.data(), lengths.data(), refs.data(), free_pages.data(), free_count.data(), R, blocks, P, pages},
                 cos.floats(), sin.floats(), nullptr, B, Hq, Hkv, 1, D, ROTARY, length + 2, 0.3f, 0.0f, nullptr};
    args.ranges = ranges.bytes.get(), args.chosen = chosen.data(), args.range_pages = blocks, args.pages_read = pages_read;
    const scratch_memory scratch = scratch_of(kvc_cuda_quest_step_scratch_bytes(&args));
    args.step.scratch = scratch.get();
    for (int i = 0; i < 2; i++) expect(kvc_cuda_quest_step(&args, nullptr), "quest_step", D);
    const int32_t grown = static_cast<int32_t>(length + 2);
    expect_true(free_count[1] == 0 && lengths.back() == grown, "quest_step's rows", D);
    const int64_t count = (grown + P - 1) / P < width ? (grown + P - 1) / P : width;
    expect_true(chosen[static_cast<size_t>(count - 1)] == (grown - 1) / P, "quest_step's newest page", D);
    kvc_quest_step_args read = args;
    read.held = 1, read.step.rotary_dim = 0, read.step.k.data = read.step.v.data = nullptr;
    const std::vector<int32_t> first = chosen;
    expect(kvc_cuda_quest_step(&read, nullptr), "quest_step of a held token", D);
    expect_true(lengths.back() == grown && chosen.back() == first.back(), "quest_step of a held token", D);
    args.step.table_rows = 1;  // positions outside
    for (int i = 0; i < 3; i++) expect(kvc_cuda_quest_step(&args, nullptr), "quest_step until full", D);
    expect_true(free_count[1] > 0, "quest_step past the table", D);
    lengths[0] = static_cast<int32_t>(blocks * P + 5);  // of a row that is too long nothing is read past its line
    expect(kvc_cuda_quest_step(&read, nullptr), "quest_step of a row past its line", D);
    expect_refused(kvc_cuda_quest_step, args, "quest_step of wrong arguments", [](auto& a) { a.step.D = 513; },
                   [](auto& a) { a.step.S = 2; }, [](auto& a) { a.pages_read = 0; },
                   [](auto& a) { a.range_pages--; }, [](auto& a) { a.held = 1; }, [](auto& a) { a.ranges = nullptr; },
                   [](auto& a) { a.chosen = nullptr; }, [](auto& a) { a.step.k.data = nullptr; },
                   [](auto& a) { a.step.scratch = nullptr; }, [](auto& a) { a.step.table.P = 3; });
    args.step.B = args.step.table.R = 0;
    expect(kvc_cuda_quest_step(&args, nullptr), "quest_step of no rows", D);
    expect_true(kvc_cuda_quest_step_scratch_bytes(&args) == 0, "scratch of quest_step of no rows", D);
}

void run_dmc_step(int64_t B, int64_t Hkv, int64_t D, int64_t window, kvc_dtype dtype) {
    const int64_t Hq = 2 * Hkv, R = B * Hkv, N = window ? window : 1;
    array q(B, Hq, 1, D, dtype), k(B, Hkv, 1, D, dtype), v(B, Hkv, 1, D, dtype), out(B * Hq * D, dtype),
        lse(B * Hq, KVC_F32), cos(POSITIONS * ROTARY / 2, KVC_F32), sin(POSITIONS * ROTARY / 2, KVC_F32),
        tail_k(R * N * D, KVC_F32), tail_v(R * N * D, KVC_F32), tail_w(R * N, KVC_F32);
    for (int64_t i = 0; i < R * N; i++) tail_w.floats()[i] = 1.0f;
    std::vector<int32_t> held(static_cast<size_t>(R), 3), places(static_cast<size_t>(B), 6);
    const std::vector<int32_t> offsets(static_cast<size_t>(B), 1), first = places;
    dmc_gates gates(B, Hkv, 1);
    pool full(R, 2 * R, D, dtype), empty(R, R - 1, D, dtype), before(R, R - 1, D, dtype);
    kvc_dmc_step_args args = {};
    args.step = {out.bytes.get(), lse.floats(), q.view(), k.view(), v.view(), rows_of(full.k, full.v, dtype), full.view(),
                 cos.floats(), sin.floats(), nullptr, B, Hq, Hkv, 1, D, ROTARY, POSITIONS, 0.3f, 0.0f, nullptr};
    args.tail_k = tail_k.floats(), args.tail_v = tail_v.floats(), args.tail_w = tail_w.floats();
    args.tail_counts = held.data(), args.places = places.data(), args.offsets = offsets.data(), args.neuron = D - 1;
    args.window = window, args.omega_shift = 1.0f, args.omega_eps = 0.1f, args.reduce = KVC_MEAN_SIGMOID;
    const scratch_memory scratch = scratch_of(kvc_cuda_dmc_step_scratch_bytes(&args));
    args.step.scratch = scratch.get();
    kvc_dmc_step_args short_of = args;
    short_of.step.table = empty.view();
    short_of.step.rows = rows_of(empty.k, empty.v, dtype);
    const std::vector<int32_t> same = held;
    expect(kvc_cuda_dmc_step(&short_of, nullptr), "dmc_step without pages", D);
    empty.expect_unchanged(before, "dmc_step without pages");
    expect_true(places == first && held == same, "dmc_step without pages", D);
    expect(kvc_cuda_dmc_step(&args, nullptr), "dmc_step", D);
    expect_true(full.free_count[1] == 0 && places[0] == first[0] + 1 && full.table[1] != 1, "dmc_step's rows", D);
    args.alpha = gates.alpha.floats(), args.omega = gates.omega.floats(), args.offsets = nullptr;
    args.step.table_rows = 3;  // positions outside
    for (int i = 0; i < 5; i++) expect(kvc_cuda_dmc_step(&args, nullptr), "dmc_step until full", D);
    expect_refused(kvc_cuda_dmc_step, args, "dmc_step of wrong arguments", [](auto& a) { a.step.D = 513; },
                   [](auto& a) { a.step.S = 2; }, [](auto& a) { a.step.S = 0; }, [](auto& a) { a.neuron = -1; },
                   [](auto& a) { a.neuron = a.step.D; }, [](auto& a) { a.step.table.R++; },
                   [](auto& a) { a.step.table.P = 3; }, [](auto& a) { a.step.rotary_dim = 3; }, [](auto& a) { a.step.Hq++; },
                   [](auto& a) { a.window = KVC_DMC_MAX_WINDOW + 1; }, [](auto& a) { a.step.scale = INFINITY; },
                   [](auto& a) { a.places = nullptr; }, [](auto& a) { a.tail_w = nullptr; },
                   [](auto& a) { a.step.v.data = nullptr; }, [](auto& a) { a.step.sin = nullptr; });
    args.step.B = args.step.table.R = 0;
    expect(kvc_cuda_dmc_step(&args, nullptr), "dmc_step of no rows", D);
    expect_true(kvc_cuda_dmc_step_scratch_bytes(&args) == 0, "scratch of dmc_step of no rows", D);
}

// Two sequences, one at its beginning and one whose ring is full; with pages these are shared until written, and run out
// in the fourth step.
void run_ring_step(int64_t D, int64_t Hq, ring kind, kvc_dtype dtype, int steps) {
    const int64_t B = 2, Hkv = 2, R = B * Hkv, window = 3, sinks = kind == ring::sinks || kind == ring::apart ? 2 : 0;
    const int64_t full = window + sinks, P = 2, pages = 9, blocks = 6, rows = 40, half = D / 4;
    array q(B, Hq, 1, D, dtype), k(B, Hkv, 1, D, dtype), v(B, Hkv, 1, D, dtype), out(B * Hq * D, dtype),
        lse(B * Hq, KVC_F32), k_ring(R * full * D, dtype), v_ring(R * full * D, dtype), k_far(R * sinks * D, dtype),
        v_far(R * sinks * D, dtype), k_pages(pages * P * D, dtype), v_pages(pages * P * D, dtype),
        cos(rows * half, KVC_F32), sin(rows * half, KVC_F32), logits(Hq, KVC_F32);
    std::vector<int32_t> places = {0, 17}, base = {0, 9}, lengths = {0, 0, 1, 1}, refs(static_cast<size_t>(pages), 0),
                         free_pages = {0, 1, 2, 3, 4, 5, 99, 99, 99}, free_count = {6, 0},
                         table(static_cast<size_t>(R * blocks), 99);
    table[static_cast<size_t>(2 * blocks)] = table[static_cast<size_t>(3 * blocks)] = 8;
    refs[8] = 2;
    std::unique_ptr<uint8_t[]> marks(new uint8_t[static_cast<size_t>(R * full)]());
    kvc_ring_step_args args = {};
    args.step = {out.bytes.get(), lse.floats(), q.view(), k.view(), v.view(), {}, {}, cos.floats(), sin.floats(), nullptr, B, Hq,
                 Hkv, 1, D, 2 * half, rows, 0.2f, 0.0f, logits.floats()};
    args.ring = rows_of(k_ring, v_ring, dtype);
    args.places = places.data(), args.base = base.data(), args.capacity = full, args.window = window, args.sinks = sinks;
    args.neuron = -1, args.chunked = kind == ring::window, args.decision_scale = 1.0f;
    if (kind == ring::apart) args.far = rows_of(k_far, v_far, dtype);
    if (kind == ring::pages) {
        args.step.rows = rows_of(k_pages, v_pages, dtype), args.marks = marks.get(), args.neuron = 0;
        args.step.table = {table.data(), lengths.data(), refs.data(), free_pages.data(), free_count.data(), R, blocks, P, pages};
        args.decision_shift = INFINITY;  // nothing is marked: all that leaves is kept
    }
    const size_t bytes = static_cast<size_t>(kvc_cuda_ring_step_scratch_bytes(&args));
    std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, bytes), std::free);
    args.step.scratch = scratch.get();
    for (int i = 0; i < steps; i++) expect(kvc_cuda_ring_step(&args, nullptr), "ring_step", D);
    const bool ran_out = kind == ring::pages && steps == 4;
    expect_true(ran_out ? free_count[1] > 0 : places[0] == steps && places[1] == 17 + steps, "places of rings", D);
    if (kind != ring::pages) {  // once more, in rows of codes
        const auto zeros = [](int64_t n) { return std::vector<uint8_t>(static_cast<size_t>(n)); };
        const auto codes = [&](int64_t slots) {
            return std::array{zeros(slots * D), zeros(slots * D / (D % 2 ? 1 : 2)), zeros(slots * 2), zeros(slots * 2)};
        };
        const auto of = [&](auto& x) {
            return kvc_rows{x[0].data(), x[1].data(), x[2].data(), x[3].data(), D % 2 ? KVC_FORMAT_INT8 : KVC_FORMAT_K8V4};
        };
        auto near = codes(R * full), far = codes(R * sinks);
        kvc_ring_step_args coded = args;
        coded.ring = of(near), coded.far = args.far.keys ? of(far) : kvc_rows{};
        const scratch_memory coded_scratch = scratch_of(kvc_cuda_ring_step_scratch_bytes(&coded));
        coded.step.scratch = coded_scratch.get();
        expect(kvc_cuda_ring_step(&coded, nullptr), "ring_step of codes", D);
        expect_true(places[1] == 18 + steps, "places of rings of codes", D);
        expect_refused(kvc_cuda_ring_step, coded, "ring_step of wrong codes", [](auto& a) { a.neuron = 0; },
                       [](auto& a) { a.ring.key_scales = nullptr; }, [](auto& a) { a.far = a.step.rows, a.far.keys = a.step.out; });
    }
    places[0] = -1;  // has no slot
    expect(kvc_cuda_ring_step(&args, nullptr), "ring_step of no place", D);
    expect_true(places[0] == -1, "places of rings", D);
    expect_refused(kvc_cuda_ring_step, args, "ring_step of wrong arguments", [](auto& a) { a.window = 0; },
                   [](auto& a) { a.capacity++; }, [](auto& a) { a.sinks = -1; }, [](auto& a) { a.neuron = a.step.D; },
                   [](auto& a) { a.step.D = 513; }, [](auto& a) { a.step.scale = NAN; }, [](auto& a) { a.places = nullptr; },
                   [](auto& a) { a.sinks = 1, a.chunked = 1; }, [](auto& a) { a.step.table.R = 3; });
}
