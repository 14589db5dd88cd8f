// Runs every CUDA kernel once over odd sizes with arrays that end exactly where the contract says, for the sanitizers.
// The Makefile builds it with -fsanitize=address,undefined and with -fsanitize=thread; the argument "few" leaves one
// case of each kernel. Prints "done" if every launch succeeds. Values are checked by the tests of the ops, here only what no op asks for: results in place and of another
// type, what a launcher refuses behind the checks of the ops, and how much scratch memory it asks for.
#include "sanitized.h"


namespace {

void run_rope(int64_t D, kvc_dtype dtype) {
    const int64_t B = 2, H = 3, T = 5, rotary_dim = D / 4 * 2;
    array x(B, H, T, D, dtype), wide(B, H, T, D, KVC_F32), right(B, H, T, D, KVC_F32), held(B, H, T, D + 8, dtype),
        before(B, H, T, D + 8, dtype), cos(7 * rotary_dim / 2, KVC_F32), sin(7 * rotary_dim / 2, KVC_F32);
    const std::vector<int32_t> positions = {0, 6, 3, 7, -1, 1, 2, 3, 4, 5};
    for (int64_t i = 0; i < B * H * T * D; i++) {
        wide.floats()[i] = load_any(x.bytes.get(), dtype, i);
        store_any(held.bytes.get(), dtype, i / D * (D + 8) + i % D, wide.floats()[i]);
    }
    kvc_rope_args args = {right.view(), wide.view(), cos.floats(), sin.floats(), positions.data(), B, H, T, D,
                          rotary_dim, 7, 1};
    expect(kvc_cuda_rope(&args, nullptr), "rope", D);
    const auto expect_right = [&](const array& found, int64_t stride, const char* what) {
        array rounded(1, found.dtype);
        const size_t size = static_cast<size_t>(bytes_of(found.dtype));
        bool same = true;
        for (int64_t i = 0; i < B * H * T * D; i++) {
            store_any(rounded.bytes.get(), found.dtype, 0, right.floats()[i]);
            const int64_t at = (i / D * stride + i % D) * bytes_of(found.dtype);
            same = same && !std::memcmp(found.bytes.get() + at, rounded.bytes.get(), size);
        }
        expect_true(same, what, D);
    };
    args.x = x.view();
    array out(B, H, T, D, dtype), other(B, H, T, D, dtype == KVC_F32 ? KVC_BF16 : KVC_F32);
    args.out = out.view();
    expect(kvc_cuda_rope(&args, nullptr), "rope", D);
    expect_right(out, D, "rope");
    expect_refused(kvc_cuda_rope, args, "rope into another type", [&](auto& a) { a.out = other.view(); });
    args.x = args.out = held.view();
    expect(kvc_cuda_rope(&args, nullptr), "rope in place", D);
    expect_right(held, D + 8, "rope in place");
    const int64_t size = bytes_of(dtype);
    for (int64_t row = 1; row <= B * H * T; row++) {
        const int64_t tail = (row * (D + 8) - 8) * size;
        expect_true(!std::memcmp(held.bytes.get() + tail, before.bytes.get() + tail, static_cast<size_t>(8 * size)),
                    "rope in place beside its part of a row", row);
    }
    args.positions = nullptr;
    expect_refused(kvc_cuda_rope, args, "rope of wrong sizes", [](auto& a) { a.table_rows = a.T - 1; },
                   [](auto& a) { a.rotary_dim = a.D / 2 * 2 + 2; });
}

void run_window_scores(int64_t D, int64_t T, kvc_dtype dtype, int64_t B = 2, int64_t Hq = 6, int64_t Hkv = 2) {
    const int64_t W = 3;
    array q(B, Hq, W, D, dtype), k(B, Hkv, T, D, dtype), scores(B * Hkv * T, KVC_F32);
    const std::vector<int32_t> lengths = {static_cast<int32_t>(T), 4};
    kvc_window_scores_args args = {scores.floats(), q.view(), k.view(), lengths.data(), nullptr, B, Hq, Hkv, W, T, D,
                                   0.3f, KVC_REDUCE_MEAN, KVC_POOL_AVG, 5, 0, 0, 0, 0.0f, nullptr};
    const size_t bytes = static_cast<size_t>(kvc_cuda_window_scores_scratch_bytes(&args));  // enough for each below
    std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, bytes), std::free);
    args.scratch = scratch.get();
    expect(kvc_cuda_window_scores(&args, nullptr), "window_scores of all keys", T);
    args.skip_last = W;
    expect(kvc_cuda_window_scores(&args, nullptr), "window_scores", T);
    args.mask_first = 2;
    args.mask_last = T / 2;
    expect(kvc_cuda_window_scores(&args, nullptr), "window_scores with masks", T);
    args.reduce = KVC_REDUCE_MAX;
    args.pool = KVC_POOL_MAX;
    expect(kvc_cuda_window_scores(&args, nullptr), "window_scores of maxima", T);
    array sinks(Hq, KVC_F32);
    args.softcap = 2.0f;
    args.sink_logits = sinks.floats();
    expect(kvc_cuda_window_scores(&args, nullptr), "window_scores with sinks", T);
    expect_refused(kvc_cuda_window_scores, args, "window_scores of wrong arguments", [](auto& a) { a.kernel_size = 4; },
                   [](auto& a) { a.kernel_size = 0; }, [](auto& a) { a.skip_last = a.T; }, [](auto& a) { a.D = 513; },
                   [](auto& a) { a.scale = INFINITY; }, [](auto& a) { a.scale = NAN; },
                   [](auto& a) { a.softcap = -1.0f; }, [](auto& a) { a.softcap = INFINITY; });
}

void run_layer_similarity(int64_t L, int64_t S, int64_t T, int64_t D, kvc_dtype dtype) {
    const int64_t Hq = 4, Hkv = 2;
    array q(L, Hq, S, D, dtype), k(L, Hkv, T, D, dtype);
    std::vector<double> sums(static_cast<size_t>(Hq * L * L), 7.0);
    kvc_layer_similarity_args args = {sums.data(), q.view(), k.view(), nullptr, L, Hq, Hkv, S, T, D, 0.3f, 1, 2, 2.0f};
    const size_t bytes = static_cast<size_t>(kvc_cuda_layer_similarity_scratch_bytes(&args));
    std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
    args.scratch = scratch.get();
    expect(kvc_cuda_layer_similarity(&args, nullptr), "layer_similarity", D);
    kvc_layer_similarity_args none = args;
    none.S = 0;
    expect(kvc_cuda_layer_similarity(&none, nullptr), "layer_similarity of no queries", D);
    for (double sum : sums) expect_true(sum == 0.0, "layer_similarity of no queries", D);
    expect_refused(kvc_cuda_layer_similarity, args, "layer_similarity of wrong arguments",
                   [](auto& a) { a.sinks = -1; }, [](auto& a) { a.recent = -1; }, [](auto& a) { a.scale = -1.0f; },
                   [](auto& a) { a.L = 189; }, [](auto& a) { a.D = 513; }, [](auto& a) { a.scale = INFINITY; },
                   [](auto& a) { a.scale = NAN; }, [](auto& a) { a.softcap = -1.0f; },
                   [](auto& a) { a.softcap = INFINITY; });
}

void run_select(int64_t T, int64_t k) {
    const int64_t R = 2;
    array scores(R * T, KVC_F32);
    std::unique_ptr<int32_t[]> indices(new int32_t[static_cast<size_t>(R * k)]);
    const std::vector<int32_t> lengths = {static_cast<int32_t>(T), static_cast<int32_t>(T / 2)};
    kvc_select_topk_args select = {indices.get(), scores.floats(), lengths.data(), R, T, k};
    expect(kvc_cuda_select_topk(&select, nullptr), "select_topk", T);
    expect_refused(kvc_cuda_select_topk, select, "select_topk of more than there are", [](auto& a) { a.k = a.T + 1; });
}

// Two rows of 6 and 5 slots in pages of 4 that share their first page and the second; 4 pages are free.
void run_pages(int64_t D, int64_t S, kvc_dtype dtype) {
    const int64_t R = 2, P = 4, pages = 7, blocks = 2 + S, bytes = D * (dtype == KVC_F32 ? 4 : 2);
    array k(pages * P * D, dtype), v(pages * P * D, dtype), new_k(1, R, S, D, dtype), new_v(1, R, S, D, dtype);
    std::vector<int32_t> table(static_cast<size_t>(R * blocks), 99), lengths = {6, 5}, refs = {2, 0, 2, 0, 0, 0, 1},
                         free_pages = {1, 3, 4, 5, 99, 99, 99}, free_count = {4, 0};
    table[0] = table[static_cast<size_t>(blocks)] = 2;
    table[1] = table[static_cast<size_t>(blocks) + 1] = 0;
    std::vector<int32_t> counts = {static_cast<int32_t>(S), 1}, append_scratch(3),
                         compact_scratch(static_cast<size_t>(R * blocks) + 1), indices = {1, 4, 0, 1}, kept = {2, 0};
    const kvc_page_table pool = {table.data(), lengths.data(), refs.data(), free_pages.data(), free_count.data(),
                                 R, blocks, P, pages};
    const auto slots = [&](const array& held, const array& added) {
        return kvc_slot_array{held.bytes.get(), added.bytes.get(), bytes, R * S * bytes, S * bytes, bytes};
    };
    const kvc_append_tokens_args append = {pool, {slots(k, new_k), slots(v, new_v)}, counts.data(),
                                           append_scratch.data(), 2, R, S};
    expect(kvc_cuda_append_tokens(&append, nullptr), "append_tokens", D);
    const kvc_compact_pages_args compact = {pool, {slots(k, new_k), slots(v, new_v)}, indices.data(), kept.data(),
                                            compact_scratch.data(), 2, 2};
    expect(kvc_cuda_compact_pages(&compact, nullptr), "compact_pages", D);
    std::vector<int32_t> nothing = {0, 0};
    const kvc_truncate_rows_args truncate = {pool, nothing.data()};
    expect(kvc_cuda_truncate_rows(&truncate, nullptr), "truncate_rows", D);
    for (int i = 0; i < 20; i++) expect(kvc_cuda_append_tokens(&append, nullptr), "append_tokens until full", D);
    expect_true(free_count[1] > 0, "what a full pool refused", D);
    expect_refused(kvc_cuda_append_tokens, append, "append_tokens of wrong sizes", [](auto& a) { a.heads = 3; });
    expect_refused(kvc_cuda_truncate_rows, truncate, "truncate_rows of wrong sizes", [](auto& a) { a.table.P = 0; });
}

void run_decode(int64_t D, int64_t Hq, int64_t P, kvc_dtype dtype, bool paged) {
    const int64_t B = 2, Hkv = 1, S = 2, pages = 3, blocks = 2;
    array q(B, Hq, S, D, dtype), k(pages * P * D, dtype), v(pages * P * D, dtype), out(B * Hq * S * D, dtype),
        lse(B * Hq * S, KVC_F32), sinks(Hq, KVC_F32);
    const std::vector<int32_t> table = {2, 0, 1, 3}, begin = {-2, 1}, end = {static_cast<int32_t>(2 * P), 1000000};
    kvc_decode_args args = {out.bytes.get(), lse.floats(), q.view(), rows_of(k, v, dtype),
                            paged ? table.data() : nullptr, begin.data(), end.data(), nullptr, B, Hq, Hkv, S, D, P,
                            pages, blocks, 0.2f, 1, nullptr, 0, 0, nullptr, 0, P, 2.0f, sinks.floats()};
    const size_t bytes = static_cast<size_t>(kvc_cuda_decode_scratch_bytes(&args));
    std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, bytes), std::free);
    args.scratch = scratch.get();
    expect(kvc_cuda_decode(&args, nullptr), "decode", D);
    const std::vector<int32_t> ends = {INT32_MIN, -1}, begins = {1, INT32_MAX};  // their differences are not of 32 bits
    args.begin = begins.data(), args.end = ends.data();
    expect(kvc_cuda_decode(&args, nullptr), "decode of corrupt lengths", D);
    args.begin = begin.data(), args.end = end.data();
    if (!paged) return;
    expect_refused(kvc_cuda_decode, args, "decode of wrong arguments", [](auto& a) { a.P = 3; },
                   [](auto& a) { a.D = 0; }, [](auto& a) { a.D = 513; },
                   [](auto& a) { a.probabilities = a.lse, a.sinks = 0; },
                   [](auto& a) { a.probabilities = a.lse, a.sinks = a.S = 0; }, [](auto& a) { a.scale = INFINITY; },
                   [](auto& a) { a.scale = NAN; }, [](auto& a) { a.softcap = -1.0f; },
                   [](auto& a) { a.softcap = INFINITY; });
    args.B = 0;
    expect(kvc_cuda_decode(&args, nullptr), "decode of no rows", D);
}

void run_long_decode(int64_t Hq, int64_t S, kvc_dtype dtype) {
    const int64_t B = 1, Hkv = 2, T = 1600, D = 40;  // more pieces than blocks: each takes several
    array q(B, Hq, S, D, dtype), k(Hkv * T * D, dtype), v(Hkv * T * D, dtype), out(B * Hq * S * D, dtype),
        lse(B * Hq * S, KVC_F32);
    const std::vector<int32_t> begin = {700, 90}, end = {static_cast<int32_t>(T), 100};
    kvc_decode_args args = {out.bytes.get(), lse.floats(), q.view(), rows_of(k, v, dtype), nullptr,
                            begin.data(), end.data(), nullptr, B, Hq, Hkv, S, D, T, Hkv, 1, 0.2f, 1, nullptr, 0, 0,
                            nullptr, 0, 600, 0.0f, nullptr};
    const size_t bytes = static_cast<size_t>(kvc_cuda_decode_scratch_bytes(&args));
    std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, bytes), std::free);
    args.scratch = scratch.get();
    expect(kvc_cuda_decode(&args, nullptr), "long decode", S);
    // as a graph would replay it: what the blocks have counted in the scratch memory is counted anew
    const size_t size = static_cast<size_t>(B * Hq * S * D * bytes_of(dtype));
    const std::vector<char> before(out.bytes.get(), out.bytes.get() + size);
    std::memset(out.bytes.get(), 0x55, size);
    expect(kvc_cuda_decode(&args, nullptr), "long decode once more", S);
    expect_true(!std::memcmp(before.data(), out.bytes.get(), size), "the bits of a long decode once more", S);
}

// Many queries over long rows: a page that is not there, first keys, rows that are empty or end behind the table. Keys of
// 300 slots are split, of 64 they are not.
void run_prefill(int64_t G, int64_t S, int64_t D, int64_t slots, kvc_dtype dtype) {
    const int64_t B = 2, Hkv = 1, Hq = Hkv * G, P = 4, blocks = slots / P, pages = blocks + 3;
    array q(B, Hq, S, D, dtype), k(pages * P * D, dtype), v(pages * P * D, dtype), out(B * Hq * S * D, dtype),
        lse(B * Hq * S, KVC_F32), sinks(Hq, KVC_F32);
    std::vector<int32_t> table, others;
    for (int64_t i = 0; i < B * blocks; i++) {
        table.push_back(static_cast<int32_t>(i % 9 == 4 ? -1 : i * 7 % pages));
        others.push_back(static_cast<int32_t>(i * 5 % (pages + 1)));
    }
    const std::vector<int32_t> begin = {-2, 19}, end = {1000000, static_cast<int32_t>(slots - 7)}, none = {0, 0};
    kvc_decode_args args = {out.bytes.get(), lse.floats(), q.view(), rows_of(k, v, dtype), table.data(),
                            begin.data(), end.data(), nullptr, B, Hq, Hkv, S, D, P, pages, blocks, 0.2f, 1,
                            others.data(), pages, blocks, nullptr, 0, 11, 2.0f, sinks.floats()};
    const size_t bytes = static_cast<size_t>(kvc_cuda_decode_scratch_bytes(&args));
    std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, bytes), std::free);
    args.scratch = scratch.get();
    expect(kvc_cuda_decode(&args, nullptr), "prefill", D);
    args.value_table = nullptr, args.softcap = 0.0f, args.causal = 0;
    expect(kvc_cuda_decode(&args, nullptr), "prefill of all keys", D);
    args.end = none.data();
    expect(kvc_cuda_decode(&args, nullptr), "prefill of no keys", D);
    const std::vector<int32_t> ends = {INT32_MIN, 1000000}, begins = {1, INT32_MAX};  // the first keys alone
    args.begin = begins.data(), args.end = ends.data(), args.causal = 1;
    expect(kvc_cuda_decode(&args, nullptr), "prefill of corrupt lengths", D);
}

// One layer's probabilities over another's values; rows reach further than the table, than the columns, and to pages
// that are not there. All query heads of the first row are skipped: its pages lie behind the array's end.
void run_decode_shared(int64_t G, int64_t D, int64_t P, kvc_dtype dtype, int64_t columns) {
    const int64_t B = 2, Hkv = 2, Hq = Hkv * G, pages = 3, blocks = 320 / P;
    array q(B, Hq, 1, D, dtype), k(pages * P * D, dtype), v(pages * P * D, dtype), out(B * Hq * D, dtype),
        near(B * Hq * D, dtype), lse(B * Hq, KVC_F32), near_lse(B * Hq, KVC_F32), shares(B * Hq * columns, KVC_F32);
    std::unique_ptr<uint8_t[]> skipped(new uint8_t[static_cast<size_t>(B * Hq)]);
    std::vector<int32_t> table;
    for (int64_t i = 0; i < B * Hkv * blocks; i++) table.push_back(static_cast<int32_t>(i % 5) - 1);
    const std::vector<int32_t> begin = {-2, 1, 300, 70}, end = {1000000, 320, 300, 72};
    kvc_decode_args decode = {out.bytes.get(), lse.floats(), q.view(), rows_of(k, v, dtype),
                              table.data(), begin.data(), end.data(), nullptr, B, Hq, Hkv, 1, D, P, pages, blocks, 0.2f,
                              1, nullptr, 0, 0, shares.floats(), columns, 0, 0.0f, nullptr};
    const size_t bytes = static_cast<size_t>(kvc_cuda_decode_scratch_bytes(&decode));
    std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, bytes), std::free);
    decode.scratch = scratch.get();
    expect(kvc_cuda_decode(&decode, nullptr), "decode with probabilities", D);
    for (int32_t& page : table) page += page == pages;  // a page more counts as there, and only the first row names it
    for (int64_t i = 0; i < blocks; i++) table[static_cast<size_t>(i)] = static_cast<int32_t>(pages);
    for (int64_t h = 0; h < B * Hq; h++) near_lse.floats()[h] = lse.floats()[h] + (h < G ? 9.0f : -9.0f);
    kvc_decode_shared_args shared = {out.bytes.get(), skipped.get(), near.bytes.get(), near_lse.floats(), lse.floats(),
                                     shares.floats(), Hq * columns, columns, columns, dtype, rows_of(v, v, dtype),
                                     table.data(), begin.data(), end.data(), nullptr, B, Hq, Hkv, D, P, pages + 1,
                                     blocks, 0.5f};
    const size_t more = static_cast<size_t>(kvc_cuda_decode_shared_scratch_bytes(&shared));
    std::unique_ptr<void, void (*)(void*)> workspace(std::aligned_alloc(64, (more + 63) / 64 * 64), std::free);
    shared.scratch = workspace.get();
    expect(kvc_cuda_decode_shared(&shared, nullptr), "decode_shared", D);
    expect_true(skipped[0] && !skipped[static_cast<size_t>(G)], "which heads are skipped", D);
    expect_refused(kvc_cuda_decode_shared, shared, "decode_shared of wrong arguments", [](auto& a) { a.P = 6; },
                   [](auto& a) { a.threshold = NAN; }, [](auto& a) { a.D = 513; }, [](auto& a) { a.far_lse = nullptr; },
                   [](auto& a) { a.begin = nullptr; }, [](auto& a) { a.probabilities = nullptr; },
                   [](auto& a) { a.Hkv = a.Hq + 1; });
    shared.B = 0;
    expect(kvc_cuda_decode_shared(&shared, nullptr), "decode_shared of no rows", D);
}

// Partial results, never logits or probabilities, and from sizes alone.
void check_scratch() {
    const int32_t table = 0;
    kvc_window_scores_args scores = {};
    scores.B = 1, scores.Hq = 32, scores.Hkv = 8, scores.W = scores.skip_last = 64, scores.T = 131072, scores.D = 128;
    scores.kernel_size = 5;
    const int64_t raw = 131072 * 8 * 4;
    expect_true(kvc_cuda_window_scores_scratch_bytes(&scores) < raw + 64 * 32 * 4 * 256 * 2,
                "scratch of window_scores", 0);
    // On tensor cores statistics and offsets of rows, once per split, of which a long window has one
    scores.q.dtype = scores.k.dtype = KVC_BF16;
    for (int64_t W : {int64_t{1}, int64_t{64}, int64_t{131072}}) {
        scores.W = W;
        const int64_t rows = 8 * (W * 4 + 127) / 128 * 128, splits = W == 131072 ? 1 : 64;
        const int64_t bytes = kvc_cuda_window_scores_scratch_bytes(&scores);
        expect_true(bytes > raw / 2 && bytes <= raw + (rows + 8 * 128) * (8 * splits + 4), "scratch of window_scores in 16 bits", W);
    }

    const int64_t pieces = 64 * 32768 / 256;
    const auto decode = [&](int64_t B, int64_t D, int64_t pages) {
        kvc_decode_args a = {};
        a.B = B, a.Hq = 32, a.Hkv = 8, a.S = 1, a.D = D, a.P = 64, a.pages = pages, a.blocks = 512;
        a.block_table = &table;
        return kvc_cuda_decode_scratch_bytes(&a);
    };
    const int64_t more = pieces + 64 * 16;  // the first 4,096 keys of a row are in pieces of half the size
    expect_true(decode(8, 128, 1) < more * (4 * 130 * 4 + 16) + 1024, "scratch of decode", 0);
    expect_true(decode(8, 128, 1000) == decode(8, 128, 1), "scratch of decode", 1);
    expect_true(decode(0, 128, 1) == 0 && decode(8, 513, 1) == 0, "scratch of decode", 2);

    const auto shared = [](int64_t B, int64_t D, int64_t P, int64_t pages, int64_t columns, float threshold) {
        kvc_decode_shared_args a = {};
        a.B = B, a.Hq = 32, a.Hkv = 8, a.D = D, a.P = P, a.pages = pages, a.blocks = 512, a.columns = columns;
        a.threshold = threshold;
        return kvc_cuda_decode_shared_scratch_bytes(&a);
    };
    expect_true(shared(8, 128, 64, 1, 9, 0.0f) == pieces * 4 * 128 * 4, "scratch of decode_shared", 0);
    expect_true(shared(8, 128, 64, 1000, 40000, 0.0f) == pieces * 4 * 128 * 4, "scratch of decode_shared", 1);
    expect_true(shared(0, 128, 64, 1, 9, 0.0f) == 0 && shared(8, 513, 64, 1, 9, 0.0f) == 0 &&
                    shared(8, 128, 6, 1, 9, 0.0f) == 0 && shared(8, 128, 64, 1, 9, NAN) == 0,
                "scratch of decode_shared", 2);
}

void run_attention(int64_t D, int64_t S, int64_t T, int64_t window, kvc_dtype dtype, int64_t B = 2, int64_t Hq = 2) {
    const int64_t Hkv = 1;
    array q(B, Hq, S, D, dtype), k(B, Hkv, T, D, dtype), v(B, Hkv, T, D, dtype), out(B, Hq, S, D, dtype),
        dout(B, Hq, S, D, dtype), dq(B, Hq, S, D, dtype), dk(B, Hkv, T, D, dtype), dv(B, Hkv, T, D, dtype),
        lse(B * Hq * S, KVC_F32), dlse(B * Hq * S, KVC_F32), bias(B * Hkv * T, KVC_F32), dbias(B * Hkv * T, KVC_F32),
        sinks(Hq, KVC_F32), dsinks(Hq, KVC_F32);
    const std::vector<int32_t> lengths = {static_cast<int32_t>(T), static_cast<int32_t>(S - 1)};
    const kvc_attention_args args = {out.view(), q.view(), k.view(), v.view(), lse.floats(), bias.floats(),
                                     lengths.data(), B, Hq, Hkv, S, T, D, window, 2, 0.2f, 1, 0, window ? 3.0f : 0.0f,
                                     sinks.floats()};
    expect(kvc_cuda_attention(&args, nullptr), "attention", D);
    kvc_attention_backward_args backward = {args, dout.view(), dq.view(), dk.view(), dv.view(), dlse.floats(),
                                            dbias.floats(), nullptr, dsinks.floats()};
    const size_t bytes = static_cast<size_t>(kvc_cuda_attention_backward_scratch_bytes(&backward));
    std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, bytes), std::free);
    backward.scratch = scratch.get();
    expect(kvc_cuda_attention_backward(&backward, nullptr), "attention backward", D);
}

void run_merge(int64_t N, int64_t D, kvc_dtype dtype) {
    array a(N * D, dtype), b(N * D, dtype), out(N * D, dtype), lse_a(N, KVC_F32), lse_b(N, KVC_F32), lse(N, KVC_F32);
    lse_a.floats()[0] = lse_b.floats()[1] = -INFINITY;
    kvc_merge_states_args args = {out.bytes.get(), lse.floats(), a.bytes.get(), b.bytes.get(), lse_a.floats(),
                                  lse_b.floats(), dtype, N, D};
    expect(kvc_cuda_merge_states(&args, nullptr), "merge_states", D);
    args.out = a.bytes.get();
    args.lse = lse_a.floats();
    expect(kvc_cuda_merge_states(&args, nullptr), "merge_states in place", D);
    const bool same = !std::memcmp(a.bytes.get(), out.bytes.get(), static_cast<size_t>(N * D * bytes_of(dtype))) &&
                      !std::memcmp(lse_a.bytes.get(), lse.bytes.get(), static_cast<size_t>(4 * N));
    expect_true(same, "merge_states in place", D);
}

void run_dmc_gates(int64_t T, kvc_dtype dtype) {
    const int64_t B = 2, H = 3;
    array x(B, 2 * H, T, 5, dtype), alpha(B * H * T, KVC_F32), hard(B * H * T, KVC_F32), tempered(B * H * T, KVC_F32);
    const kvc_view logits = {x.bytes.get(), dtype, x.strides[0], x.strides[1], x.strides[2]};
    const kvc_dmc_decisions_args decisions = {alpha.floats(), hard.floats(), tempered.floats(), logits, nullptr, B, H, T,
                                              77, 1, 2, 3, 4, 5.0f, 0.1f, 1.0f, 0.0f, 1, 0};
    expect(kvc_cuda_dmc_decisions(&decisions, nullptr), "dmc_decisions", T);
    const kvc_dmc_importance_args importance = {alpha.floats(), logits, B, 2 * H, H, T, 5.0f, 0.0f, KVC_MEAN_SIGMOID};
    expect(kvc_cuda_dmc_importance(&importance, nullptr), "dmc_importance", T);
    const kvc_dmc_mask_args mask = {hard.floats(), tempered.floats(), B, H, T};
    expect(kvc_cuda_dmc_mask(&mask, nullptr), "dmc_mask", T);
}

void run_dmc_accumulate(int64_t T, int64_t D, int64_t window, kvc_dtype dtype, int64_t B = 2, int64_t H = 2) {
    const int64_t chunks = window && window < T ? 0 : (T + KVC_DMC_CHUNK - 1) / KVC_DMC_CHUNK;
    array k(B, H, T, D, dtype), v(B, H, T, D, dtype), out_k(B, H, T, D, dtype), out_v(B, H, T, D, dtype),
        dout_k(B, H, T, D, dtype), dout_v(B, H, T, D, dtype), dk(B, H, T, D, dtype), dv(B, H, T, D, dtype),
        z(B * H * T, KVC_F32), dalpha(B * H * T, KVC_F32), domega(B * H * T, KVC_F32),
        states(B * H * chunks * 2 * D, KVC_F32), initial(B * H * D, KVC_F32), initial_z(B * H, KVC_F32);
    const dmc_gates gates(B, H, T);
    for (int64_t i = 0; i < B * H; i++) initial_z.floats()[i] = 1.5f;
    float* before = window ? nullptr : initial.floats();
    kvc_dmc_accumulate_args args = {out_k.view(), out_v.view(), k.view(), v.view(), z.floats(), states.floats(),
                                    gates.alpha.floats(), gates.omega.floats(), before, before,
                                    window ? nullptr : initial_z.floats(), nullptr, B, H, T, D, D - 1, window};
    const size_t bytes = static_cast<size_t>(kvc_cuda_dmc_accumulate_scratch_bytes(&args));
    std::unique_ptr<void, void (*)(void*)> scratch(std::malloc(bytes), std::free);
    args.scratch = scratch.get();
    expect(kvc_cuda_dmc_accumulate(&args, nullptr), "dmc_accumulate", T);
    kvc_dmc_accumulate_backward_args backward = {args, dout_k.view(), dout_v.view(), dk.view(), dv.view(), dalpha.floats(),
                                                 domega.floats(), nullptr};
    const size_t more = static_cast<size_t>(kvc_cuda_dmc_accumulate_backward_scratch_bytes(&backward));
    std::unique_ptr<void, void (*)(void*)> workspace(std::malloc(more), std::free);
    backward.scratch = workspace.get();
    expect(kvc_cuda_dmc_accumulate_backward(&backward, nullptr), "dmc_accumulate backward", T);
}

void run_dmc_append(int64_t S, int64_t D, int64_t window, kvc_dtype dtype) {
    // two rows share a full last page, which both join and so copy; the third is empty
    const int64_t H = 3, P = 2, blocks = S / P + 3, pages = H * blocks, N = window ? window : 1;
    const int64_t pieces = (S + KVC_DMC_PIECE - 1) / KVC_DMC_PIECE, rotary_dim = D / 4 * 2;
    std::vector<int32_t> table(static_cast<size_t>(H * blocks), -1), lengths = {2, 2, 0}, held = {3, 70, 0}, positions,
        refs(static_cast<size_t>(pages), 0), free_list(static_cast<size_t>(pages), -1), counts = {
        static_cast<int32_t>(S), static_cast<int32_t>(S), static_cast<int32_t>(S / 2)},
        scratch(static_cast<size_t>(H * (3 + pieces) + 1));
    std::vector<int32_t> free_count = {static_cast<int32_t>(pages - 1), 0};
    table[0] = table[static_cast<size_t>(blocks)] = 0;
    refs[0] = 2;
    for (int64_t i = 1; i < pages; i++) free_list[static_cast<size_t>(i - 1)] = static_cast<int32_t>(i);
    for (int64_t s = 0; s < S; s++) positions.push_back(static_cast<int32_t>(s % 9) - 1);
    array k(1, H, S, D, dtype), v(1, H, S, D, dtype), k_pages(pages * P * D, dtype), v_pages(pages * P * D, dtype),
        tail_k(H * N * D, KVC_F32), tail_v(H * N * D, KVC_F32), tail_w(H * N, KVC_F32), cos(7 * rotary_dim / 2, KVC_F32),
        sin(7 * rotary_dim / 2, KVC_F32);
    for (int64_t i = 0; i < H * N; i++) tail_w.floats()[i] = 1.0f;
    dmc_gates gates(1, H, S);
    gates.alpha.floats()[0] = 1.0f;
    const kvc_page_table pool = {table.data(), lengths.data(), refs.data(), free_list.data(), free_count.data(), H, blocks,
                                 P, pages};
    const kvc_dmc_append_args args = {pool, rows_of(k_pages, v_pages, dtype), k.view(), v.view(), tail_k.floats(),
                                      tail_v.floats(), tail_w.floats(), held.data(), gates.alpha.floats(),
                                      gates.omega.floats(), cos.floats(), sin.floats(), positions.data(), counts.data(),
                                      scratch.data(), 1, H, S, D, rotary_dim, 7, D - 1, window};
    expect(kvc_cuda_dmc_append(&args, nullptr), "dmc_append", S);
    expect_true(free_count[1] == 0, "dmc_append without refusal", S);
}

}  // namespace

int main(int count, char** arguments) {
    check_scratch();
    if (count > 1 && !std::strcmp(arguments[1], "few")) {
        run_rope(33, KVC_BF16);
        run_window_scores(33, 70, KVC_BF16, 1, 3, 1);
        run_window_scores(40, 150, KVC_F16, 1, 4, 2);
        run_layer_similarity(3, 2, 70, 33, KVC_BF16);
        run_select(77, 30);
        run_pages(33, 3, KVC_BF16);
        run_decode(33, 2, 8, KVC_F32, true);
        run_long_decode(4, 2, KVC_BF16);
        run_long_decode(2, 1, KVC_F32);
        run_prefill(3, 22, 40, 300, KVC_BF16);
        run_prefill(2, 33, 136, 64, KVC_F16);
        run_ring_step(8, 2, ring::pages, KVC_F32, 2);
        run_decode_shared(1, 33, 8, KVC_F32, 290);
        run_decode_shared(2, 64, 64, KVC_BF16, 290);
        run_merge(9, 33, KVC_BF16);
        run_attention(40, 35, 70, 12, KVC_BF16, 1, 1);
        run_attention(24, 9, 40, 12, KVC_F32, 1, 1);
        run_attention(300, 17, 20, 12, KVC_BF16, 1, 1);
        run_attention(260, 3, 17, 0, KVC_F32, 1, 1);
        run_decode(260, 2, 8, KVC_F32, true);
        run_decode_shared(1, 300, 8, KVC_BF16, 290);
        run_dmc_gates(9, KVC_BF16);
        run_dmc_accumulate(300, 33, 0, KVC_BF16, 1, 1);
        run_dmc_accumulate(20, 36, 5, KVC_F32, 1, 1);
        run_dmc_append(1, 33, 0, KVC_BF16);
        run_dmc_append(300, 20, 0, KVC_F32);
        run_dmc_append(9, 20, 5, KVC_F32);
        run_paged_step(1, 2, 1, 33, KVC_BF16);
        run_quest_step(1, 2, 5, 33, 3, 90, KVC_BF16);
        run_dmc_step(1, 2, 33, 5, KVC_F32);
    } else {
        for (kvc_dtype dtype : {KVC_F32, KVC_BF16, KVC_F16})
            for (int64_t D : {33, 64}) {
                if (dtype == KVC_F16 && D == 64) continue;  // the code of bfloat16
                run_rope(D, dtype);
                run_window_scores(D, 4, dtype);
                run_window_scores(D, 70, dtype);
                run_layer_similarity(3, 2, 70, D, dtype);
                run_pages(D, 1, dtype);
                run_pages(D, 3, dtype);
                for (ring kind : {ring::window, ring::sinks, ring::apart, ring::pages})
                    if (dtype != KVC_F16) run_ring_step(D, 4, kind, dtype, D == 33 && kind == ring::pages ? 4 : 2);
                run_decode(D, 1, 8, dtype, true);
                run_decode(D, 5, 8, dtype, true);
                run_decode(D, 3, 13, dtype, false);
                for (int64_t G : {1, 3, 9}) run_decode_shared(G, D, 32, dtype, 270 + D);
                run_merge(9, D, dtype);
                run_attention(D, 35, 70, D == 33 ? 0 : 12, dtype);
                run_dmc_gates(D, dtype);
                run_dmc_accumulate(70, D, 0, dtype);
                run_dmc_accumulate(70, D, 12, dtype);
                run_dmc_append(1, D, 0, dtype);
                run_dmc_append(1, D, 3, dtype);
                run_dmc_append(40, D, 0, dtype);
            }
        run_ring_step(8, 64, ring::pages, KVC_F32, 2);  // a launch for the heads
        run_dmc_accumulate(500, 132, 0, KVC_BF16, 1, 1);
        run_dmc_accumulate(500, 1, 0, KVC_F32, 1, 1);
        run_dmc_accumulate(99, 256, 64, KVC_F16, 1, 1);
        run_dmc_append(600, 200, 0, KVC_BF16);
        run_dmc_append(300, 70, 64, KVC_F32);
        run_decode_shared(4, 256, 4, KVC_F32, 5);
        run_decode_shared(18, 200, 64, KVC_F16, 320);
        run_long_decode(4, 2, KVC_F32);
        run_long_decode(10, 4, KVC_BF16);
        run_prefill(4, 40, 128, 300, KVC_BF16);
        run_prefill(1, 70, 72, 64, KVC_F16);
        run_prefill(7, 10, 256, 300, KVC_F16);
        run_attention(200, 7, 9, 0, KVC_F16);
        run_attention(200, 7, 9, 0, KVC_F32);
        run_attention(136, 3, 70, 5, KVC_BF16);
        for (kvc_dtype dtype : {KVC_F32, KVC_BF16})
            for (int64_t D : {512, 301}) {
                run_attention(D, 20, 40, D == 512 ? 0 : 12, dtype, 1, 2);
                run_decode(D, 5, 8, dtype, true);
                run_decode(D, 1, 13, dtype, false);
                run_decode_shared(1, D, 32, dtype, 290);
                run_decode_shared(3, D, 32, dtype, 290);
                run_window_scores(D, 70, dtype);
                run_layer_similarity(2, 1, 5, D, dtype);
                run_dmc_append(3, D, 0, dtype);
                run_dmc_accumulate(70, D, 0, dtype, 1, 1);
            }
        run_select(2500, 1200);
        for (kvc_dtype dtype : {KVC_F32, KVC_BF16, KVC_F16}) {
            run_paged_step(2, 2, 1, 40, dtype);    // one block
            run_paged_step(2, 2, 3, 33, dtype);
            run_quest_step(2, 2, 2, 40, 3, 7, dtype);  // one block
            run_quest_step(1, 1, 6, 33, 40, 200, dtype);
            run_dmc_step(2, 2, 40, 0, dtype);
            run_dmc_step(2, 2, 33, 5, dtype);
        }
        run_paged_step(15, 3, 1, 20, KVC_BF16);  // a launch for the heads
        run_quest_step(15, 3, 2, 20, 9, 6, KVC_BF16);  // every page
        run_quest_step(1, 1, 2, 8, 400, 900, KVC_F32);  // more slots than one piece of decode
        run_dmc_step(15, 3, 20, 0, KVC_F32);
        run_paged_step(1, 2, 1, 512, KVC_F32);
        run_quest_step(1, 2, 2, 512, 1, 9, KVC_F32);
        run_dmc_step(1, 2, 512, 64, KVC_BF16);
        check_contracts();
        run_layer_similarity(24, 1, 70, 8, KVC_F32);
    }
    if (failures == 0) std::printf("done\n");
    return failures != 0;
}
