// Emulates CUDA threads on one core of a CPU.
//
// A thread is a fiber. It runs until it has to wait for others: at the barrier of its block, or at an instruction that a warp
// executes together. Then other threads run, in an order that the caller chooses. Without races all orders give the same result.

#pragma once

#include <link.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <tuple>
#include <unordered_map>
#include <vector>

#define __shared__ static thread_local  // blocks run one after another; `forget_shared` overwrites thread-local variables
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Index { unsigned x, y; } threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

enum Order { FORWARD, REVERSED, SHUFFLED };
enum Instruction { SYNC, SHUFFLE, LOAD, LOAD_TRANSPOSED, MULTIPLY };

struct Meeting { int arrived = 0, held = 0; };  // of threads that wait for each other; `held` counts completed meetings

struct Warp {
  Meeting meeting;
  Instruction instruction;
  unsigned operands[2][32][6];  // two sets, because a thread may be at the next instruction while others still read the operands of the last one
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 18);
  const Meeting* meeting;  // the meeting that it waits for, or null
  int held;                // `held` of that meeting when it started to wait
  bool over;
  std::vector<std::pair<void*, const void*>> copies;  // pending
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
Meeting barrier;
Fiber* running;
ucontext_t scheduler;
std::function<void()> body;               // the code of every thread
const char* fault;                        // why the launch cannot continue
int room_bytes;                           // bytes of dynamic shared memory of the launch
std::unordered_map<float*, double> sums;  // sums that the launch has accumulated in memory

void leave() { swapcontext(&running->context, &scheduler); }

void require(bool condition, const char* otherwise) {
  if (condition) return;
  fault = otherwise;
  leave();  // never returns
}

void meet(Meeting& meeting, unsigned threads) {
  if (++meeting.arrived == threads) {
    meeting = {0, meeting.held + 1};
  } else {
    running->meeting = &meeting, running->held = meeting.held;
    leave();
  }
}

using Operands = unsigned (*)[6];  // of each thread of a warp

// Passes this thread's operands to an instruction of its warp and returns those of all threads.
Operands exchange(Instruction instruction, std::initializer_list<unsigned> mine) {
  Warp& warp = warps[threadIdx.x / 32];
  Operands operands = warp.operands[warp.meeting.held % 2];
  if (warp.meeting.arrived == 0) warp.instruction = instruction;
  require(warp.instruction == instruction, "threads of a warp are at different instructions");
  std::copy(mine.begin(), mine.end(), operands[threadIdx.x % 32]);
  meet(warp.meeting, 32);
  return operands;
}

__align__(16) thread_local char origin[16];  // of shared memory

// Fills shared memory with ones (NaNs), so that reading data that this block has not written is noticed.
void forget_shared() {
  auto fill = [](dl_phdr_info* library, size_t, void*) {
    char* start = (char*)library->dlpi_tls_data;
    for (int i = 0; i < library->dlpi_phnum; i++) {
      size_t bytes = library->dlpi_phdr[i].p_memsz;
      bool ours = library->dlpi_phdr[i].p_type == PT_TLS && origin >= start && origin < start + bytes;
      if (ours) memset(start, 0xff, bytes);
    }
    return 0;
  };
  dl_iterate_phdr(fill, nullptr);
}

void run_block(unsigned threads, Order order, std::mt19937& random) {
  forget_shared();
  barrier = {};
  warps.assign((threads + 31) / 32, {});
  std::vector<unsigned> turns(threads);
  std::iota(turns.begin(), turns.end(), 0);
  if (order == REVERSED) std::reverse(turns.begin(), turns.end());
  for (unsigned t : turns) {
    Fiber& fiber = fibers[t];
    fiber.meeting = nullptr, fiber.over = false, fiber.copies.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
    makecontext(&fiber.context, [] { body(), running->over = true, leave(); }, 0);
  }
  for (unsigned left = threads; left > 0;) {
    if (order == SHUFFLED) std::shuffle(turns.begin(), turns.end(), random);
    fault = "threads wait for each other for ever";  // unless a thread can run
    for (unsigned t : turns) {
      Fiber& fiber = fibers[t];
      if (fiber.over || fiber.meeting && fiber.meeting->held == fiber.held) continue;
      fault = nullptr, running = &fiber, threadIdx.x = t;
      swapcontext(&scheduler, &fiber.context);
      left -= fiber.over;
      if (fault) return;
    }
    if (fault) return;
  }
}

// Runs a kernel and returns an error message, or null.
template <class... Args>
const char* launch(void (*kernel)(Args...), void** args, size_t n_args, Index blocks, unsigned threads, Order order) {
  if (n_args != sizeof...(Args)) return "the kernel takes another number of arguments";
  std::tuple<Args...> values{*(Args*)*args++...};
  body = [&] { std::apply(kernel, values); };
  std::mt19937 random;
  sums.clear();
  if (fibers.size() < threads) fibers.resize(threads);
  gridDim = blocks, blockDim = {threads, 1}, fault = nullptr;
  for (unsigned n = 0, all = blocks.x * blocks.y; n < all && !fault; n++) {
    unsigned block = order == REVERSED ? all - 1 - n : n;
    blockIdx = {block % blocks.x, block / blocks.x};
    run_block(threads, order, random);
  }
  return fault;
}

}  // namespace emulated
