// Emulates what the kernels need of CUDA on a CPU: keywords, functions, and the functions that resnet.cu has in assembler.

#define EMULATED

#include <cmath>

#include "threads.h"

#define __device__
#define __global__
#define __launch_bounds__(...)

using std::max;
using std::min;
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

void __syncthreads() { emulated::meet(emulated::barrier, blockDim.x); }

void __syncwarp() { emulated::exchange(emulated::SYNC, {}); }

template <class To, class From>
To bits_as(From x) {
  To same;
  static_assert(sizeof same == sizeof x);
  memcpy(&same, &x, sizeof x);
  return same;
}

float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }

float __shfl_xor_sync(unsigned, float x, int far) {
  auto of = emulated::exchange(emulated::SHUFFLE, {bits_as<unsigned>(x)});
  return bits_as<float>(of[threadIdx.x % 32 ^ far][0]);
}

template <class T>
T __ldg(const T* p) {
  emulated::require((size_t)p % sizeof(T) == 0, "an address is not a multiple of what is read there");
  return *p;
}

template <class T>
T load(const void* p) { return __ldg((const T*)p); }

void take_turn() {}  // launches do not overlap

char* room() {
  __shared__ __align__(16) char bytes[1 << 17];
  return bytes;
}

// The copies are made in `await_copies`, so that a kernel that does not wait for them finds the previous contents.
void copy(void* to, const void* from) {
  emulated::require((char*)to + 16 <= room() + emulated::room_bytes, "the launch has asked for less shared memory");
  emulated::require((size_t)to % 16 == 0 && (size_t)from % 16 == 0, "an address is not a multiple of what is copied there");
  emulated::running->copies.push_back({to, from});
}

void await_copies() {
  for (auto [to, from] : emulated::running->copies) memcpy(to, from, 16);
  emulated::running->copies.clear();
}

float __fdividef(float a, float b) { return a / b; }
float rsqrtf(float x) { return 1 / sqrtf(x); }
uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

void atomicAdd(int* to, int x) { *to += x; }  // the kernels do not use the previous value
void atomicMin(int* to, int x) { *to = min(*to, x); }
void atomicMax(int* to, int x) { *to = max(*to, x); }

// Sums are accumulated in double precision, so that they do not depend on the order of threads, and any difference is a race.
void atomicAdd(float* to, float x) {
  double& sum = emulated::sums[to];
  if ((float)sum != *to) sum = *to;  // the kernel has written to it
  *to = sum += x;
}

// Functions that resnet.cu has in assembler

unsigned round_to_bf16(float x) {
  unsigned bits = bits_as<unsigned>(x);
  return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

unsigned pack(float low, float high) { return round_to_bf16(low) | round_to_bf16(high) << 16; }

unsigned pack_above_zero(float low, float high) { return pack(low < 0 ? 0 : low, high < 0 ? 0 : high); }

// Shared memory has addresses of 32 bits.
unsigned at(const void* p) { return (const char*)p - emulated::origin; }

// Loads four 8x8 matrices. Lane l gives the address of row l % 8 of matrix l / 8, and gets two neighbors in row l / 4 of each matrix.
void load(emulated::Instruction instruction, unsigned (&r)[4], unsigned address) {
  emulated::require(address % 16 == 0, "the address of a matrix's row is not a multiple of 16");
  auto rows = emulated::exchange(instruction, {address});
  for (int matrix = 0; matrix < 4; matrix++) {
    unsigned pair[2];
    for (int half = 0; half < 2; half++) {
      int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2 + half;
      if (instruction == emulated::LOAD_TRANSPOSED) std::swap(row, column);
      pair[half] = ((const unsigned short*)(emulated::origin + (int)rows[matrix * 8 + row][0]))[column];
    }
    r[matrix] = pair[0] | pair[1] << 16;
  }
}

void load_matrices(unsigned (&r)[4], unsigned address) { load(emulated::LOAD, r, address); }
void load_transposed(unsigned (&r)[4], unsigned address) { load(emulated::LOAD_TRANSPOSED, r, address); }

// Row n of a and column n of b are held, in pairs, by the four lanes starting at n % 8 · 4.
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  auto of = emulated::exchange(emulated::MULTIPLY, {a[0], a[1], a[2], a[3], b0, b1});
  for (int i = 0; i < 4; i++) {
    int row = threadIdx.x % 32 / 4 + i / 2 * 8, column = threadIdx.x % 4 * 2 + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; k += 2) {
      unsigned x = of[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], y = of[column * 4 + k % 8 / 2][4 + k / 8];
      sum += bits_as<float>(x << 16) * bits_as<float>(y << 16);
      sum += bits_as<float>(x & 0xffff0000) * bits_as<float>(y & 0xffff0000);
    }
    c[i] += sum;
  }
}

void add_two(float* to, float a, float b) {
  atomicAdd(to, a);
  atomicAdd(to + 1, b);
}
