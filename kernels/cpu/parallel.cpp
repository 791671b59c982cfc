#include "parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

namespace kvir {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<GompParallel> gomp{nullptr};

// Threads that sleep until they are needed.  One job at a time: callers queue up.
class Pool {
public:
    void run(int threads, void (*fn)(void*), void* context) {
        std::lock_guard<std::mutex> one_job(jobs_);
        grow(threads - 1);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            fn_ = fn;
            context_ = context;
            wanted_ = threads - 1;
            running_ = threads - 1;
        }
        wake_.notify_all();
        fn(context);
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return running_ == 0; });
    }

private:
    void grow(int workers) {
        // A thread that cannot be had leaves its share to the others: work is taken, not dealt out.
        while (int(workers_.size()) < workers) workers_.emplace_back([this] { work(); });
    }
    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return wanted_ > 0; });
            wanted_--;
            lock.unlock();
            fn_(context_);
            lock.lock();
            if (--running_ == 0) done_.notify_one();
        }
    }

    std::mutex jobs_, mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    void (*fn_)(void*) = nullptr;
    void* context_ = nullptr;
    int wanted_ = 0, running_ = 0;
};

// Threads do not survive a fork, so a child makes its own pool.  A pool is never destroyed: its threads may outlive
// main.
Pool& pool() {
    static std::mutex mutex;
    static Pool* instance = nullptr;
    static pid_t owner = 0;
    std::lock_guard<std::mutex> lock(mutex);
    if (instance == nullptr || owner != getpid()) {
        instance = new Pool;
        owner = getpid();
    }
    return *instance;
}

struct Buffer {
    void* data = nullptr;
    int64_t bytes = 0;
    ~Buffer() { std::free(data); }
};

}  // namespace

void use_gomp(void* gomp_parallel) { gomp.store(reinterpret_cast<GompParallel>(gomp_parallel)); }

void parallel(int threads, void (*fn)(void*), void* context) {
    if (threads <= 1)
        fn(context);
    else if (GompParallel call = gomp.load(std::memory_order_relaxed))
        call(fn, context, unsigned(threads), 0);
    else
        pool().run(threads, fn, context);
}

void* scratch(int slot, int64_t bytes) {
    static thread_local Buffer buffers[3];
    Buffer& buffer = buffers[slot];
    if (buffer.bytes < bytes) {
        std::free(buffer.data);
        buffer.bytes = (bytes + 4095) / 4096 * 4096;
        buffer.data = std::aligned_alloc(64, size_t(buffer.bytes));
        if (buffer.data == nullptr) std::abort();
    }
    return buffer.data;
}

void order_by_cost(const int64_t* cost, int64_t count, int32_t* order) {
    std::iota(order, order + count, 0);
    std::stable_sort(order, order + count, [cost](int32_t i, int32_t j) { return cost[i] > cost[j]; });
}

}  // namespace kvir
