/* What the C tests share: checks that name the failing case, random numbers, ways to run ranges, and the tables. */
#ifndef CHECK_H
#define CHECK_H
#include "../../csrc/kvc.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern int failures;
extern const char *test_case;

#define CHECK(condition)                                                                                  \
    do {                                                                                                  \
        if (!(condition)) {                                                                               \
            failures++;                                                                                   \
            fprintf(stderr, "%s:%d: %s [%s, %s]\n", __FILE__, __LINE__, #condition, test_case, kvc_simd_name()); \
        }                                                                                                 \
    } while (0)

/* Exact allocations, so that the sanitizer sees a step over any end. */
void *room(int64_t bytes);

/* Uniform in [-1, 1), the same sequence in every run. */
float uniform(void);
void fill(float *values, int64_t count, float scale);

/* Rounds count values to dtype in a new array, and in place to what that array holds. */
void *rounded(float *values, int64_t count, kvc_dtype dtype);
float element(const void *array, int64_t index, kvc_dtype dtype);
double epsilon(kvc_dtype dtype);

/* NULL runs whole; the others cut into single items backwards, into threes, and over three threads. */
enum { RUNNERS = 4 };
extern const kvc_parallel_for runners[RUNNERS];

/* Tables that this CPU can run; the first is the portable one. */
extern const char *tables[4];
extern int table_count;

void test_score(void);
void test_decode(void);
void test_decode_shared(void);
void test_flash(void);
void test_merge(void);
void test_pages(void);
void test_planner(void);
void test_dmc(void);
void test_step(void);
void test_quest_step(void);
void test_similarity(void);
void test_codes(void);
void test_fuzzed(void);
#endif
