// Work shared out over threads.
#pragma once
#include <cstdint>

namespace kvir {

// Calls fn(context) on up to `threads` threads at once, this one included, and returns when all calls have returned.
// Runs on the OpenMP pool that `use_gomp` named, else on a pool of our own.
void parallel(int threads, void (*fn)(void*), void* context);

// The address of the GOMP_parallel to call; null for our own pool.
void use_gomp(void* gomp_parallel);

// Calls item(i, next) once for every i in [0, count), on up to `threads` threads, each taking the next i when it is
// free.  `next` is what the same thread will do after i, or -1 if that is not settled yet.
template <class F> void parallel_items(int threads, int64_t count, F& item) {
    if (count < threads) threads = int(count);
    if (threads <= 1) {
        for (int64_t i = 0; i < count; i++) item(i, i + 1 < count ? i + 1 : -1);
        return;
    }
    struct Shared {
        int64_t taken, count, ahead;
        F* item;
        int64_t take() { return __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED); }
        // Near the end nobody takes a second item while others may have none.
        bool plenty() { return __atomic_load_n(&taken, __ATOMIC_RELAXED) < ahead; }
        void work() {
            for (int64_t i = take(); i < count;) {
                const int64_t next = plenty() ? take() : -1;
                (*item)(i, next < count ? next : -1);
                i = next >= 0 ? next : take();
            }
        }
    } shared{0, count, count - 2 * threads, &item};
    parallel(threads, [](void* context) { static_cast<Shared*>(context)->work(); }, &shared);
}

// `bytes` of memory aligned to 64 bytes, valid until this thread asks for the same slot again.  Slots 0 and 2 are for
// the thread that calls an op, slot 1 for the threads that work on it.
void* scratch(int slot, int64_t bytes);

// order[0 .. count) = the indices of cost, dearest first, equals in order.
void order_by_cost(const int64_t* cost, int64_t count, int32_t* order);

}  // namespace kvir
