// How an emulated launch runs: blocks one by one, a block's threads as fibers (ucontext), which the sanitizers are told
// of; barriers of a block and of a warp; the report of threads that wait for each other for ever.
#include "block_threads.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>
#if defined(__SANITIZE_ADDRESS__) || defined(KVC_TELL_THREAD_SANITIZER)
#include <dlfcn.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/tsan_interface.h>
#endif

namespace kvc_emulation {

const dim3* thread_index = nullptr;
dim3 block_index, block_size, grid_size;

namespace {

// ---- one block in flight ----

const char* const warp_op_names[] = {"__syncthreads", "__syncwarp", "a shuffle", "a ballot", "a matrix operation"};

struct copy {
    void* to;
    const void* from;
    size_t bytes;
    bool there;
};

struct thread_state {
    dim3 thread_idx;
    unsigned index = 0;  // in the block; lane = index % 32
    bool in_syncthreads = false;
    bool exited = false;
    warp_op waits_at = warp_op::none;
    unsigned mask = 0, source = 0;     // of that operation
    uint64_t given = 0, received = 0;  // bits that it offers and gets there
    unsigned gone = 0;                 // lanes of the mask that had returned when it was over
    char exit;                         // what orders memory where it returns
    unsigned exchanges = 0;
    std::vector<std::vector<copy>> copies = std::vector<std::vector<copy>>(1);  // groups; the last one is open
    ucontext_t context;
    jmp_buf resumed;  // where it goes on, once it has begun
    bool begun = false;
    char* stack = nullptr;
    void* fake_stack = nullptr;  // AddressSanitizer's, while another fiber runs
    void* fiber = nullptr;       // ThreadSanitizer's
};

// Orders, for ThreadSanitizer, the memory at a barrier: who leaves acquires what all who came have released.
// Others may by then be on their way to the next one, so every other time has a place of its own.
struct meeting {
    char places[2];
    unsigned count = 0;  // how often all have come
};

struct warp_state {
    std::map<unsigned, meeting> of_lanes;  // by the mask
    char exchanged[2][32 * 32];            // of every other exchange: one barrier per exchange is enough
};

struct deadlock {};  // thrown in threads that can never go on, to unwind them

struct block_state {
    void* shared = nullptr;
    void (*body)(void*) = nullptr;
    void* context = nullptr;
    std::vector<thread_state> threads;
    std::vector<warp_state> warps;
    meeting of_threads;
    char begin, exits;  // what orders memory there; exits: all threads' so far
    unsigned arrived = 0, alive = 0;
    jmp_buf scheduled;
    void* scheduler_fiber = nullptr;
    const void* scheduler_stack = nullptr;
    size_t scheduler_stack_size = 0;
    void* scheduler_fake_stack = nullptr;
};

block_state* block = nullptr;
thread_state* current = nullptr;
bool failed = false;
std::string message;  // of the last failure
cudaError_t last_error = cudaSuccess;
std::map<const void*, size_t> shared_limits;
void (*notes)(const void* kernel, unsigned blocks, unsigned threads, size_t shared_bytes) = nullptr;

void fail(const std::string& what) {
    if (failed) return;
    failed = true;
    const dim3 at = block_index;
    message = "CUDA emulation: block (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
              std::to_string(at.z) + "): " + what;
    std::fprintf(stderr, "%s\n", message.c_str());
    last_error = cudaErrorLaunchFailure;
}

// ---- fibers, and what the sanitizers are told of them ----

constexpr size_t STACK_BYTES = 256 * 1024;

#if defined(__SANITIZE_ADDRESS__) || defined(KVC_TELL_THREAD_SANITIZER)
// libc's own: the sanitizers' takes the stacks for one, and swapcontext forgets at every switch where their arrays end.
void jump(jmp_buf to) {
    typedef void (*function)(jmp_buf, int);
    static const function own =
        reinterpret_cast<function>(dlsym(dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD), "_longjmp"));
    own(to, 1);
}
#else
void jump(jmp_buf to) { _longjmp(to, 1); }
#endif

#ifdef __SANITIZE_ADDRESS__
void leave_stack(void** fake, const void* next, size_t bytes) { __sanitizer_start_switch_fiber(fake, next, bytes); }
void come_to_stack(void* fake, const void** last, size_t* bytes) { __sanitizer_finish_switch_fiber(fake, last, bytes); }
void clear_stack(char* stack) { __asan_unpoison_memory_region(stack, STACK_BYTES); }
#else
void leave_stack(void**, const void*, size_t) {}
void come_to_stack(void*, const void**, size_t*) {}
void clear_stack(char*) {}
#endif

#ifdef KVC_TELL_THREAD_SANITIZER
void* scheduler_fiber() { return __tsan_get_current_fiber(); }
void* fiber_of(unsigned index) {
    static std::vector<void*> fibers;  // kept between launches
    while (fibers.size() <= index) fibers.push_back(__tsan_create_fiber(0));
    return fibers[index];
}
void switch_to(void* fiber) { __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync); }
void release(char* place) { __tsan_release(place); }
void acquire(char* place) { __tsan_acquire(place); }
#else
void* scheduler_fiber() { return nullptr; }
void* fiber_of(unsigned) { return nullptr; }
void switch_to(void*) {}
void release(char*) {}
void acquire(char*) {}
#endif

char* stack_of(unsigned index) {
    static std::vector<std::unique_ptr<char[]>> stacks;  // kept between launches; pages nobody touches cost nothing
    while (stacks.size() <= index) stacks.emplace_back(new char[STACK_BYTES]);
    return stacks[index].get();
}

// Without the two system calls of swapcontext, which take most of a switch.
void switch_to_scheduler(thread_state& self, bool for_good) {
    if (!_setjmp(self.resumed)) {
        leave_stack(for_good ? nullptr : &self.fake_stack, block->scheduler_stack, block->scheduler_stack_size);
        switch_to(block->scheduler_fiber);
        jump(block->scheduled);
    }
    come_to_stack(self.fake_stack, nullptr, nullptr);
}

template <class Released>
void wait(thread_state& self, Released released) {
    while (!released() && !failed) switch_to_scheduler(self, false);
    if (failed) throw deadlock{};
}

char* come(meeting& at) {
    char* place = &at.places[at.count % 2];
    release(place);
    return place;
}

// ---- barriers ----

// Threads that have returned count as arrived, as on devices since Volta: what they did is ordered before what follows
// a barrier that was over later, and before nothing else. Whoever completes a block's takes it over for all.
void release_block_if_complete() {
    if (block->arrived == 0 || block->arrived < block->alive) return;
    if (block->alive < block->threads.size()) {
        acquire(&block->exits);
        come(block->of_threads);
    }
    block->arrived = 0;
    block->of_threads.count++;
    for (thread_state& t : block->threads) t.in_syncthreads = false;
}

// The threads of lanes [0, 32) of a warp; fewer in the last warp of a block that is not a multiple of 32.
thread_state* lane_of(unsigned warp, unsigned lane) {
    const unsigned index = warp * 32 + lane;
    return index < block->threads.size() ? &block->threads[index] : nullptr;
}

meeting& meeting_of(unsigned warp, unsigned mask) { return block->warps[warp].of_lanes[mask]; }

// Releases the lanes of `mask` if all of them that live wait at the same operation with the same mask.
void release_lanes_if_complete(unsigned warp, unsigned mask, warp_op operation) {
    uint64_t votes = 0;
    unsigned gone = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        const thread_state* t = mask >> lane & 1 ? lane_of(warp, lane) : nullptr;
        if (operation == warp_op::exchange && (!t || t->exited))
            fail("lane " + std::to_string(lane) + " of warp " + std::to_string(warp) +
                 " takes no part in a matrix operation");
        if (t && t->exited) gone |= 1u << lane;
        if (!t || t->exited) continue;
        if (t->waits_at != operation || t->mask != mask) return;
        votes |= static_cast<uint64_t>(t->given != 0) << lane;
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        thread_state* t = mask >> lane & 1 ? lane_of(warp, lane) : nullptr;
        if (!t || t->exited) continue;
        t->received = votes;
        t->gone = gone;
        if (operation == warp_op::shuffle) {
            const thread_state* from = mask >> t->source & 1 ? lane_of(warp, t->source) : nullptr;
            if (!from || from->exited)
                fail("lane " + std::to_string(lane) + " of warp " + std::to_string(warp) + " shuffles from lane " +
                     std::to_string(t->source) + ", which takes no part");
            else
                t->received = from->given;
        }
        t->waits_at = warp_op::none;
    }
    meeting_of(warp, mask).count++;
}

void thread_exits(thread_state& self) {
    const unsigned warp = self.index / 32;
    release(&self.exit);
    release(&block->exits);
    self.exited = true;
    block->alive--;
    for (unsigned lane = 0; lane < 32; lane++) {
        const thread_state* t = lane_of(warp, lane);
        if (t && !t->exited && t->waits_at != warp_op::none && t->mask >> self.index % 32 & 1)
            release_lanes_if_complete(warp, t->mask, t->waits_at);
    }
    release_block_if_complete();
}

void run_thread(thread_state& self) {
    try {
        block->body(block->context);
    } catch (const deadlock&) {
    }
    thread_exits(self);
}

// ---- running a block ----

void fiber_main() {
    thread_state& self = *current;
    come_to_stack(nullptr, &block->scheduler_stack, &block->scheduler_stack_size);
    acquire(&block->begin);
    run_thread(self);
    switch_to_scheduler(self, true);
}

void resume(thread_state& t) {
    current = &t;
    thread_index = &t.thread_idx;
    if (!_setjmp(block->scheduled)) {
        leave_stack(&block->scheduler_fake_stack, t.stack, STACK_BYTES);
        switch_to(t.fiber);
        if (t.begun) jump(t.resumed);
        t.begun = true;
        setcontext(&t.context);
    }
    come_to_stack(block->scheduler_fake_stack, nullptr, nullptr);
}

// Who waits where, for the report of a deadlock.
std::string waiting_threads() {
    std::string text = "threads wait for each other for ever:";
    int shown = 0;
    for (const thread_state& t : block->threads)
        if (!t.exited && shown++ < 8)
            text += " thread " + std::to_string(t.index) + " at " + warp_op_names[static_cast<int>(t.waits_at)] + ",";
    if (shown > 8) text += " and " + std::to_string(shown - 8) + " more,";
    text.back() = '.';
    return text;
}

void run_threads() {
    const char* order = std::getenv("KVC_EMULATION_ORDER");
    const bool reverse = order && std::strcmp(order, "reverse") == 0;
    for (thread_state& t : block->threads) {
        t.stack = stack_of(t.index);
        t.fiber = fiber_of(t.index);
        clear_stack(t.stack);
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack;
        t.context.uc_stack.ss_size = STACK_BYTES;
        t.context.uc_link = nullptr;
        makecontext(&t.context, fiber_main, 0);
    }
    block->scheduler_fiber = scheduler_fiber();
    release(&block->begin);
    const size_t count = block->threads.size();
    while (block->alive > 0) {
        bool progress = false;
        for (size_t i = 0; i < count; i++) {
            thread_state& t = block->threads[reverse ? count - 1 - i : i];
            const bool waits = t.in_syncthreads || t.waits_at != warp_op::none;
            if (t.exited || (waits && !failed)) continue;
            progress = true;
            resume(t);
        }
        if (!progress) fail(waiting_threads());
    }
    acquire(&block->exits);
}

void run_block(size_t shared_bytes, void (*body)(void*), void* context) {
    block_state state;
    const dim3 size = block_size;
    state.body = body;
    state.context = context;
    state.alive = size.x * size.y * size.z;
    state.threads = std::vector<thread_state>(state.alive);
    state.warps = std::vector<warp_state>((state.alive + 31) / 32);
    for (unsigned i = 0; i < state.alive; i++) {
        state.threads[i].index = i;
        state.threads[i].thread_idx = dim3(i % size.x, i / size.x % size.y, i / size.x / size.y);
    }
    std::unique_ptr<void, void (*)(void*)> shared(std::malloc(shared_bytes), std::free);
    if (shared_bytes) std::memset(shared.get(), 0xff, shared_bytes);
    state.shared = shared.get();
    block = &state;
    run_threads();
    block = nullptr;
}

}  // namespace

void syncthreads() {
    thread_state& self = *current;
    char* place = come(block->of_threads);
    self.in_syncthreads = true;
    block->arrived++;
    release_block_if_complete();
    wait(self, [&] { return !self.in_syncthreads; });
    acquire(place);
}

uint64_t warp_operation(warp_op operation, unsigned mask, uint64_t given, unsigned source) {
    thread_state& self = *current;
    const unsigned warp = self.index / 32;
    if (!(mask >> self.index % 32 & 1)) {
        fail("a lane calls a warp operation whose mask leaves it out");
        throw deadlock{};
    }
    self.mask = mask;
    self.given = given;
    self.source = source;
    self.waits_at = operation;
    char* place = come(meeting_of(warp, mask));
    release_lanes_if_complete(warp, mask, operation);
    wait(self, [&] { return self.waits_at == warp_op::none; });
    // as CUDA has it, these order no memory
    if (operation == warp_op::shuffle || operation == warp_op::ballot) return self.received;
    acquire(place);
    for (unsigned lane = 0; lane < 32; lane++)
        if (self.gone >> lane & 1) acquire(&lane_of(warp, lane)->exit);
    return self.received;
}

const char* warp_exchange(const void* given, size_t bytes) {
    thread_state& self = *current;
    char* all = block->warps[self.index / 32].exchanged[self.exchanges++ % 2];
    std::memcpy(all + 32 * (self.index % 32), given, bytes);
    warp_operation(warp_op::exchange, 0xffffffffu, 0, 0);
    return all;
}

void check_aligned(const void* at, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(at) % bytes) fail("an address is no multiple of " + std::to_string(bytes));
}

void async_copy(void* to, const void* from, size_t bytes, bool there) {
    check_aligned(to, bytes);
    if (there) check_aligned(from, bytes);
    std::memset(to, 0xff, bytes);  // may be overwritten from now on, so whoever still needs it has to be done
    current->copies.back().push_back({to, from, bytes, there});
}

void async_commit() { current->copies.emplace_back(); }

void async_wait(unsigned groups) {
    std::vector<std::vector<copy>>& copies = current->copies;
    while (copies.size() > groups + 1) {
        for (const copy& one : copies.front())
            if (one.there) std::memcpy(one.to, one.from, one.bytes);
            else std::memset(one.to, 0, one.bytes);
        copies.erase(copies.begin());
    }
}

void launch_body(const void* kernel, dim3 grid, dim3 threads, size_t shared_bytes, void (*body)(void*), void* context) {
    if (driver_version() < 13000) {
        last_error = cudaErrorInsufficientDriver;
        return;
    }
    const auto limit = shared_limits.find(kernel);
    const size_t allowed = limit == shared_limits.end() ? 48 * 1024 : limit->second;
    const uint64_t count = static_cast<uint64_t>(threads.x) * threads.y * threads.z;
    if (count < 1 || count > 1024 || threads.z > 64 || grid.x < 1 || grid.y < 1 || grid.z < 1 ||
        grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) {
        last_error = cudaErrorInvalidConfiguration;
        return;
    }
    if (shared_bytes > allowed) {
        last_error = cudaErrorInvalidValue;
        return;
    }
    failed = false;
    if (notes) {
        notes(kernel, grid.x * grid.y * grid.z, static_cast<unsigned>(count), shared_bytes);
        return;
    }
    grid_size = grid;
    block_size = threads;
    for (unsigned z = 0; z < grid.z && !failed; z++)
        for (unsigned y = 0; y < grid.y && !failed; y++)
            for (unsigned x = 0; x < grid.x && !failed; x++) {
                block_index = dim3(x, y, z);
                run_block(shared_bytes, body, context);
            }
}

int driver_version() {
    const char* wish = std::getenv("KVC_EMULATION_DRIVER");
    return wish ? std::atoi(wish) : 13000;
}

bool noting() { return notes != nullptr; }

void* dynamic_shared() { return block->shared; }

unsigned lane() { return current->index % 32; }

cudaError_t take_last_error() {
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

void allow_shared_bytes(const void* kernel, size_t bytes) { shared_limits[kernel] = bytes; }

}  // namespace kvc_emulation

// While `taker` is not null, launches are told to it and run nothing: benchmarks/gpu/gate/launches.py.
extern "C" void kvc_emulation_note_launches(void (*taker)(const void*, unsigned, unsigned, size_t)) {
    kvc_emulation::notes = taker;
}
