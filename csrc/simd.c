/* Chooses the table of inner loops, once, from the CPU's features and KVC_SIMD. */
#include "simd.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* Relaxed order is enough: the tables are constant, and two threads that choose at once choose the same. */
static _Atomic(const kvc_simd *) active;

/* The table of that name if this CPU can run it, else NULL. */
static const kvc_simd *find(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const int pairs = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (pairs && strcmp(name, kvc_simd_avx512_bf16.name) == 0) return &kvc_simd_avx512_bf16;
    if (avx512 && strcmp(name, kvc_simd_avx512.name) == 0) return &kvc_simd_avx512;
    if (avx2 && strcmp(name, kvc_simd_avx2.name) == 0) return &kvc_simd_avx2;
#endif
    return strcmp(name, kvc_simd_portable.name) == 0 ? &kvc_simd_portable : NULL;
}

const kvc_simd *kvc_simd_table(void) {
    const kvc_simd *table = atomic_load_explicit(&active, memory_order_relaxed);
    if (table) return table;
    const char *wish = getenv("KVC_SIMD");
    if (wish) table = find(wish);
    if (!table) table = find("avx512_bf16");
    if (!table) table = find("avx512");
    if (!table) table = find("avx2");
    if (!table) table = &kvc_simd_portable;
    atomic_store_explicit(&active, table, memory_order_relaxed);
    return table;
}

const char *kvc_simd_name(void) {
    return kvc_simd_table()->name;
}

kvc_status kvc_simd_select(const char *name) {
    if (!name) return KVC_NULL_POINTER;
    const kvc_simd *table = find(name);
    if (!table) return KVC_BAD_SIMD;
    atomic_store_explicit(&active, table, memory_order_relaxed);
    return KVC_OK;
}
