// What the CUDA launchers refuse, and rows with gaps between them: what no op of the extension reaches.
#include "sanitized.h"

namespace {

// [B, H, T, D] whose rows have a gap between them and start on no 16 bytes.
struct gapped {
    array all;
    int64_t rows, D;

    gapped(int64_t B, int64_t H, int64_t T, int64_t width, kvc_dtype type)
        : all(B, H, T, width + 8, type), rows(B * H * T), D(width) {
        std::memset(all.bytes.get(), 0x55, bytes(rows * (D + 8)));
    }
    size_t bytes(int64_t elements) const { return static_cast<size_t>(elements) * (all.dtype == KVC_F32 ? 4 : 2); }
    kvc_view view() const {
        kvc_view x = all.view();
        x.data = all.bytes.get() + bytes(3);
        return x;
    }
    void expect_as(const array& plain, const char* what) const {
        bool right = true;
        for (int64_t i = 0; i < rows; i++) {
            const char* row = all.bytes.get() + bytes(i * (D + 8));
            right &= std::memcmp(row + bytes(3), plain.bytes.get() + bytes(i * D), bytes(D)) == 0;
            for (size_t j = 0; j < bytes(D + 8); j++) right &= (j >= bytes(3) && j < bytes(D + 3)) || row[j] == 0x55;
        }
        expect_true(right, what, rows);
    }
};

void check_attention_contract(kvc_dtype dtype) {
    const int64_t B = 1, Hq = 2, Hkv = 1, S = 20, T = 40, D = 16;
    array q(B, Hq, S, D, dtype), k(B, Hkv, T, D, dtype), out(B, Hq, S, D, dtype), dout(B, Hq, S, D, dtype),
        dq(B, Hq, S, D, dtype), dk(B, Hkv, T, D, dtype), dv(B, Hkv, T, D, dtype), lse(B * Hq * S, KVC_F32),
        scratch(B * Hq * S + 16, KVC_F32);
    const kvc_attention_args right = {out.view(), q.view(), k.view(), k.view(), lse.floats(), nullptr, nullptr, B, Hq,
                                      Hkv, S, T, D, 0, 0, 0.2f, 1, 0, 0.0f, nullptr};
    kvc_attention_backward_args backward = {right, dout.view(), dq.view(), dk.view(), dv.view(), nullptr, nullptr,
                                            scratch.bytes.get(), nullptr};
    expect(kvc_cuda_attention(&right, nullptr), "attention", D);
    expect(kvc_cuda_attention_backward(&backward, nullptr), "attention backward", D);
    gapped out2(B, Hq, S, D, dtype), dq2(B, Hq, S, D, dtype), dk2(B, Hkv, T, D, dtype), dv2(B, Hkv, T, D, dtype);
    kvc_attention_args apart = right;
    apart.out = out2.view();
    expect(kvc_cuda_attention(&apart, nullptr), "attention to gapped rows", D);
    const kvc_attention_backward_args apart_backward = {apart, dout.view(), dq2.view(), dk2.view(), dv2.view(), nullptr,
                                                        nullptr, scratch.bytes.get(), nullptr};
    expect(kvc_cuda_attention_backward(&apart_backward, nullptr), "attention backward to gapped rows", D);
    out2.expect_as(out, "out"), dq2.expect_as(dq, "dq"), dk2.expect_as(dk, "dk"), dv2.expect_as(dv, "dv");
    const auto refused = [&](const char* what, auto change) {
        kvc_attention_args args = right;
        change(args);
        expect_refused(kvc_cuda_attention(&args, nullptr), what);
        backward.forward = args;
        expect_refused(kvc_cuda_attention_backward(&backward, nullptr), what);
        expect_true(kvc_cuda_attention_backward_scratch_bytes(&backward) == 0, what, 0);
    };
    refused("window below 0", [](auto& a) { a.window = -1; });
    refused("sinks below 0", [](auto& a) { a.window = 3, a.sinks = -1; });
    refused("window that is not causal", [](auto& a) { a.window = 3, a.causal = 0; });
    refused("complement of no window", [](auto& a) { a.complement = 1; });
    refused("more queries than keys", [](auto& a) { a.S = 41; });
    refused("no head dim", [](auto& a) { a.D = 0; });
    refused("large head dim", [](auto& a) { a.D = KVC_CUDA_MAX_HEAD_DIM + 1; });
    refused("uneven groups", [](auto& a) { a.Hq = 3, a.Hkv = 2; });
    refused("infinite scale", [](auto& a) { a.scale = INFINITY; });
    refused("softcap below 0", [](auto& a) { a.softcap = -1.0f; });
    refused("softcap of NaN", [](auto& a) { a.softcap = NAN; });
    refused("mixed dtypes", [&](auto& a) { a.k.dtype = dtype == KVC_F32 ? KVC_BF16 : KVC_F32; });
}

void check_dmc_contract(kvc_dtype dtype) {
    const int64_t H = 2, T = 99, D = 16;
    array k(1, H, T, D, dtype), out_k(1, H, T, D, dtype), out_v(1, H, T, D, dtype), dk(1, H, T, D, dtype),
        dv(1, H, T, D, dtype), z(H * T, KVC_F32), dalpha(H * T, KVC_F32), domega(H * T, KVC_F32),
        states(H * 2 * 2 * D, KVC_F32), scratch(4 * KVC_DMC_MAX_WINDOW * H * T, KVC_F32);
    const dmc_gates gates(1, H, T);
    for (int64_t window : {0, 9, KVC_DMC_MAX_WINDOW + 1}) {
        gapped out_k2(1, H, T, D, dtype), out_v2(1, H, T, D, dtype), dk2(1, H, T, D, dtype), dv2(1, H, T, D, dtype);
        kvc_dmc_accumulate_args args = {out_k.view(), out_v.view(), k.view(), k.view(), z.floats(), states.floats(),
                                        gates.alpha.floats(), gates.omega.floats(), nullptr, nullptr, nullptr,
                                        scratch.bytes.get(), 1, H, T, D, -1, window};
        kvc_dmc_accumulate_backward_args backward = {args, k.view(), k.view(), dk.view(), dv.view(), dalpha.floats(),
                                                     domega.floats(), scratch.bytes.get()};
        if (window > KVC_DMC_MAX_WINDOW) {
            expect_refused(kvc_cuda_dmc_accumulate(&args, nullptr), "large window");
            expect_refused(kvc_cuda_dmc_accumulate_backward(&backward, nullptr), "large window");
            continue;
        }
        expect(kvc_cuda_dmc_accumulate(&args, nullptr), "dmc_accumulate", window);
        expect(kvc_cuda_dmc_accumulate_backward(&backward, nullptr), "dmc_accumulate backward", window);
        args.out_k = out_k2.view(), args.out_v = out_v2.view();
        backward.dk = dk2.view(), backward.dv = dv2.view();
        expect(kvc_cuda_dmc_accumulate(&args, nullptr), "dmc_accumulate to gapped rows", window);
        expect(kvc_cuda_dmc_accumulate_backward(&backward, nullptr), "dmc_accumulate backward to gapped rows", window);
        out_k2.expect_as(out_k, "out_k"), out_v2.expect_as(out_v, "out_v");
        dk2.expect_as(dk, "dk"), dv2.expect_as(dv, "dv");
        args.D = backward.forward.D = KVC_CUDA_MAX_HEAD_DIM + 1;
        expect_refused(kvc_cuda_dmc_accumulate(&args, nullptr), "large head dim");
        expect_refused(kvc_cuda_dmc_accumulate_backward(&backward, nullptr), "large head dim");
    }
    const kvc_dmc_importance_args importance = {z.floats(), k.view(), 1, 3, 2, 4, 5.0f, 0.0f, KVC_MEAN_SIGMOID};
    expect_refused(kvc_cuda_dmc_importance(&importance, nullptr), "uneven groups");

    // two rows of one page of two slots
    std::vector<int32_t> table = {0, 1}, lengths = {0, 0}, refs = {0, 0}, free_list = {0, 1}, free_count = {2, 0},
        held = {0, 0}, workspace(16, 0);
    const kvc_page_table pool = {table.data(), lengths.data(), refs.data(), free_list.data(), free_count.data(), 2, 1,
                                 2, 2};
    const kvc_dmc_append_args right = {pool, rows_of(out_k, out_v, dtype), k.view(), k.view(), states.floats(),
                                       states.floats(), z.floats(), held.data(), gates.alpha.floats(),
                                       gates.omega.floats(), z.floats(), z.floats(), nullptr, nullptr, workspace.data(),
                                       1, H, 2, D, 4, 2, -1, 0};
    expect(kvc_cuda_dmc_append(&right, nullptr), "dmc_append", 2);
    expect_true(free_count[1] == 0, "dmc_append that fits", 2);
    const auto refused = [&](const char* what, auto change) {
        kvc_dmc_append_args args = right;
        change(args);
        expect_refused(kvc_cuda_dmc_append(&args, nullptr), what);
    };
    refused("rows of another number", [](auto& a) { a.Hkv = 3; });
    refused("more than D to rotate", [](auto& a) { a.rotary_dim = D + 2; });
    refused("tables that are too short", [](auto& a) { a.table_rows = 1; });
}

}  // namespace

void check_contracts() {
    for (kvc_dtype dtype : {KVC_F32, KVC_BF16}) {
        check_attention_contract(dtype);
        check_dmc_contract(dtype);
    }
}
