/* Without clang: inputs by chance instead of by coverage, or the files named.
 *     fuzz_random ROUNDS [SEED]     fuzz_random FILE... */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST = 400 };

static int run_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return perror(path), 1;
    uint8_t data[65536];
    const size_t size = fread(data, 1, sizeof data, file);
    fclose(file);
    LLVMFuzzerTestOneInput(data, size);
    return 0;
}

int main(int count, char **given) {
    char *end = NULL;
    const long rounds = count > 1 ? strtol(given[1], &end, 10) : 100000;
    if (count > 1 && *end) {
        int failed = 0;
        for (int i = 1; i < count; i++) failed |= run_file(given[i]);
        return failed;
    }
    const uint64_t seed = count > 2 ? strtoull(given[2], NULL, 10) : 0;
    printf("fuzz: %ld rounds, seed %llu\n", rounds, (unsigned long long)seed);
    fflush(stdout);
    for (long round = 0; round < rounds; round++) {
        uint64_t state = (seed + 1) * 0x9e3779b97f4a7c15u ^ ((uint64_t)round + 1) * 0xbf58476d1ce4e5b9u;
        uint8_t data[MOST];
        for (int i = 0; i < MOST; i++) {
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            data[i] = (uint8_t)(state >> 32);
        }
        LLVMFuzzerTestOneInput(data, MOST);
    }
    return 0;
}
