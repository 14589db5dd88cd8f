/* What the fuzzers of the C kernels share: a kernel's arguments out of the bytes of one input, and what must hold after
 * the call. Arrays are as large as csrc/kvc.h says and no byte larger, so that the sanitizers see a step over any end. */
#ifndef FUZZ_H
#define FUZZ_H
#include "../../../csrc/kvc.h"

#include <stddef.h>

/* The next number of the input, least..most; its end reads as zeros, which give least. */
int64_t between(int64_t least, int64_t most);

/* Whether a thing that happens once in so many does. */
int once_in(int64_t many);

/* Any number: near 0, at the limits of types, or all bits of the input. */
int64_t any_number(void);
float any_float(void);

kvc_dtype any_dtype(void);
kvc_format any_format(void);

/* Arrays of one call; those that are not writable must come back as they were. Contents: what the kernel takes, with
 * NaN, infinities and integers out of range among it where the input says so. */
enum { READ = 0, WRITE = 1 };
void *elements(int64_t count, kvc_dtype dtype, int writable);
float *floats(int64_t count, int writable);
float *positive(int64_t count);
void *codes(int64_t bytes, int writable);
/* Pages of keys and values, so many each, of `slots` slots. */
kvc_rows stored(kvc_format format, int64_t pages, int64_t value_pages, int64_t slots, int64_t D, int writable);
int32_t *integers(int64_t count, int64_t least, int64_t most, int writable);
int64_t *sizes(int64_t count, int64_t least, int64_t most, int writable);
uint8_t *flags(int64_t count, int writable);
void *scratch(int64_t bytes);

/* A [B, H, T, D] array of any strides that do not overlap; one that is only read may have strides of 0. */
kvc_view view(int64_t B, int64_t H, int64_t T, int64_t D, kvc_dtype dtype, int writable);

/* R rows of at most `longest` slots, some of which share pages, and free pages; fields may be damaged. */
kvc_page_table page_table(int64_t R, int64_t P, int64_t longest);

/* One of these may become NULL, one of those negative, 0 or a little smaller: arrays are then larger than they need be. */
void *pointer_field(void *field);
void size_field(int64_t *field);
void damage(void);

/* Ends a call. changes_nothing: every array must be as it was if the status is an error. */
void finish(kvc_status status, int changes_nothing);

/* One call of the kernel of each number. */
typedef void (*fuzzer)(void);
extern const fuzzer plain_fuzzers[], cache_fuzzers[], step_fuzzers[]; /* NULL at their ends */

#define POINTER(field) pointer_field(&(field))
#define SIZE(field) size_field(&(field))
#endif
