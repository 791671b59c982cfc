// Work shared out over threads.
#pragma once
#include <cstdint>

namespace kvir {

// Calls fn(context) on up to `threads` threads at once, this one included, and returns when all calls have returned.
// Runs on the OpenMP pool that `use_gomp` named, else on a pool of our own.
void parallel(int threads, void (*fn)(void*), void* context);

// The address of the GOMP_parallel to call; null for our own pool.
void use_gomp(void* gomp_parallel);

// Calls item(i) once for every i in [0, count), on up to `threads` threads, each taking the next i when it is free.
template <class F> void parallel_items(int threads, int64_t count, F& item) {
    if (count < threads) threads = int(count);
    if (threads <= 1) {
        for (int64_t i = 0; i < count; i++) item(i);
        return;
    }
    struct Shared {
        int64_t next;
        int64_t count;
        F* item;
    } shared;
    shared.next = 0;
    shared.count = count;
    shared.item = &item;
    parallel(threads, [](void* context) {
        Shared& s = *static_cast<Shared*>(context);
        for (int64_t i; (i = __atomic_fetch_add(&s.next, 1, __ATOMIC_RELAXED)) < s.count;) (*s.item)(i);
    }, &shared);
}

// `bytes` of memory aligned to 64 bytes, valid until this thread asks for the same slot again.  Slot 0 is for the
// thread that calls an op, slot 1 for the threads that work on it.
void* scratch(int slot, int64_t bytes);

// order[0 .. count) = the indices of cost, dearest first, equals in order.
void order_by_cost(const int64_t* cost, int64_t count, int32_t* order);

}  // namespace kvir
