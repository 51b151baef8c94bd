// Training of CIFAR ResNets in bf16: one launch computes a 3x3 convolution and the batch norms before and after it.
//
// Activations have the layout (images, rows, columns, channels). A convolution writes its raw output y and the two sums over pixels
// that batch norm needs. Every kernel that reads y normalizes it while loading it:
//
//     bn(y) = scale · y + shift,   scale = gamma · rstd,   shift = beta - mean · scale.
//
// In the backward pass, g is the gradient of bn(y). Its sums are the gradients of beta and gamma: G1 = sum g and
// G2 = sum g · (y - mean) · rstd. The gradient of y is then linear in g and y, plus a constant per channel:
//
//     dy = scale · (g - G1/P - (y - mean) · rstd · G2/P)        (P: number of pixels).
//
// The sums of all layers are one array of shape (2, T), where T is the number of channels of all layers.
//
// A block of threads processes some rows of one image. It copies the packed weights and these rows, with a border of one pixel, to
// shared memory once. Then it multiplies them for each of the nine taps with 16x8x16 products of the tensor cores.
//
// A launch starts while the previous one finishes (`take_turn`). Code before that call may read only data that was written two
// launches ago or earlier.

using bf16 = unsigned short;  // as bits
constexpr float EPS = 1e-5f, MOMENTUM = 0.1f;  // of batch norm; the defaults of torch

constexpr int ROWS = 8;  // image rows per block; ROWS_PER_BLOCK in resnet.py
__device__ constexpr int warps_for(int channels) { return channels == 64 ? 8 : 4; }  // by the channels of the result

#ifndef EMULATED  // tests/emulator has its own versions of these functions

__device__ unsigned pack(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Packs relu of both values; NaN stays NaN.
__device__ unsigned pack_above_zero(float low, float high) {
  unsigned pair;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ void load_matrices(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ void load_transposed(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Waits until the previous launch has finished, and allows the next one to start.
__device__ void take_turn() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns the dynamic shared memory of the launch.
__device__ char* room() {
  extern __shared__ __align__(16) char bytes[];
  return bytes;
}

// Starts to copy 16 bytes; `await_copies` waits for the copies of this thread.
__device__ void copy(void* to_shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at(to_shared)), "l"(from) : "memory");
}

__device__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Not __ldg: it requires that nothing writes the data while the kernel runs, but the previous launch may still be writing it.
template <class T>
__device__ T load(const void* p) { return *(const T*)p; }

__device__ void add_two(float* to, float a, float b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b) : "memory");
#else
  atomicAdd(to, a);
  atomicAdd(to + 1, b);
#endif
}

#endif

__device__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// relu that keeps NaN, so that a diverging run does not go on unnoticed.
__device__ float above_zero(float x) { return x < 0.f ? 0.f : x; }

// Batch norm of each channel

struct Moments { float first, second; };

// Divides the sums of a channel by the number of pixels P.
__device__ Moments moments(const float* sums, int c, int T, float P) {
  return {__fdividef(sums[c], P), __fdividef(sums[T + c], P)};
}

struct Statistics { float mean, rstd; };

__device__ Statistics statistics(const float* sums, int c, int T, float P) {
  Moments m = moments(sums, c, T, P);
  return {m.first, rsqrtf(above_zero(m.second - m.first * m.first) + EPS)};
}

// The following functions use one thread for each channel. Every block has at least as many threads as channels.

template <int C>
__device__ void scale_and_shift(float* scale, float* shift, const float* sums, const float* gamma, const float* beta, int T,
                                float P) {
  if (int c = threadIdx.x; c < C) {
    Statistics s = statistics(sums, c, T, P);
    scale[c] = gamma[c] * s.rstd;
    shift[c] = beta[c] - s.mean * scale[c];
  }
}

// dy = of_g · g + of_y · y + constant
template <int C>
__device__ void backward_affine(float* of_g, float* of_y, float* constant, const float* sums, const float* grads,
                                const float* gamma, int T, float P) {
  if (int c = threadIdx.x; c < C) {
    Statistics s = statistics(sums, c, T, P);
    Moments G = moments(grads, c, T, P);
    float scale = gamma[c] * s.rstd, slope = G.second * s.rstd;
    of_g[c] = scale;
    of_y[c] = -scale * slope;
    constant[c] = scale * (slope * s.mean - G.first);
  }
}

// Running statistics of a layer: mean and unbiased variance. `sums` has the sums of all layers.
struct Average { float *mean, *variance; long long *count, first, channels, side; };

__device__ void update(const Average& a, const float* sums, int images, int T) {
  int c = threadIdx.x;
  float P = (float)images * a.side * a.side;
  if (c < a.channels) {
    Moments m = moments(sums, a.first + c, T, P);
    float mean = m.first, variance = above_zero(m.second - mean * mean);
    a.mean[c] += MOMENTUM * (mean - a.mean[c]);
    a.variance[c] += MOMENTUM * (variance * P / (P - 1) - a.variance[c]);
  }
  if (c == 0) ++*a.count;
}

// Tiles in shared memory. Each pixel is padded by 16 bytes, so that eight neighbors are in different banks

__device__ constexpr int bytes_of(int C) { return 2 * C + 16; }
__device__ constexpr int bordered(int n, int stride) { return (n - 1) * stride + 3; }

// Loads a tile: `fetch` reads it from global memory to registers and `store` writes it to shared memory, so that other work can be
// done in between. A tile has R image rows of WIDE pixels, BEFORE rows above and AFTER rows below, and a border of zeros at the
// sides (`clear_sides`). A thread loads the same eight channels of several pixels.

template <int C, int N_THREADS, int WIDE, int R, int BEFORE, int AFTER>
struct Carrier {
  static constexpr int H = BEFORE + R + AFTER, W = BEFORE + WIDE + AFTER, BYTES = H * W * bytes_of(C);
  static constexpr int PARTS = C / 8, AT_ONCE = N_THREADS / PARTS, EACH = (H * WIDE + AT_ONCE - 1) / AT_ONCE;
  static __device__ int part() { return threadIdx.x % PARTS * 8; }
  static __device__ int index(int e) { return e * AT_ONCE + threadIdx.x / PARTS; }
  static __device__ bool is_one(int e) { return index(e) < H * WIDE; }
  static __device__ int line(int e) { return index(e) / WIDE; }
  static __device__ int column(int e) { return index(e) % WIDE; }
  static __device__ uint4* place(char* tile, int line, int column) {
    return (uint4*)(tile + (line * W + column) * bytes_of(C) + 2 * part());
  }
  static __device__ void put(char* tile, int e, uint4 v) {
    if (is_one(e)) *place(tile, line(e), BEFORE + column(e)) = v;
  }
  static __device__ void clear_sides(char* tile) {
    constexpr int SIDES = BEFORE + AFTER;
    if constexpr (SIDES > 0)
      for (int i = threadIdx.x / PARTS; i < H * SIDES; i += AT_ONCE)
        *place(tile, i / SIDES, i % SIDES < BEFORE ? 0 : W - 1) = {0, 0, 0, 0};
  }
};

// Reads eight consecutive floats from shared memory.
__device__ void read(float (&to)[8], const float* from) {
  uint4 bits[2] = {*(const uint4*)from, *(const uint4*)(from + 4)};
#pragma unroll
  for (int k = 0; k < 8; k++) to[k] = __uint_as_float(((const unsigned*)bits)[k]);
}

// The shortcut of a residual block: pixel (r, c) of x, or with STEP 2 every second pixel and row, padded on both sides with
// channels of zeros. Returns eight of the C channels, starting at `part`. X_C 0 means that there is no shortcut.
template <int C, int X_C, int SIDE>
__device__ uint4 shortcut(const bf16* x, int image, int r, int c, int part) {
  if constexpr (X_C > 0) {
    constexpr int STEP = C / X_C;
    int k = part - (C - X_C) / 2;
    if (k >= 0 && k < X_C) return load<uint4>(x + (((image * SIDE + r) * STEP * SIDE + c) * STEP) * X_C + k);
  }
  return {0, 0, 0, 0};
}

// Returns relu(bn(y) + more) of eight channels, where scale and shift belong to these channels. Without ADDS, `more` is ignored.
template <bool ADDS>
__device__ uint4 joined(uint4 y, uint4 more, const float* scale, const float* shift) {
  unsigned *to = (unsigned*)&y, *add = (unsigned*)&more;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    float a = low(to[k]) * scale[2 * k] + shift[2 * k], b = high(to[k]) * scale[2 * k + 1] + shift[2 * k + 1];
    if (ADDS) a += low(add[k]), b += high(add[k]);
    to[k] = pack_above_zero(a, b);
  }
  return y;
}

// The input of a convolution for the rows [row, row + R) of its output, with border. FORM says what is stored: FINISHED, the input
// itself; RAW, to be normalized; JOINT, a raw branch to which a shortcut with X_C channels is added, and the sum is also written to
// `out`. Three channels (images) are padded with zeros to sixteen.
constexpr int FINISHED = 0, RAW = 1, JOINT = 2;

template <int STORED, int SIDE, int R, int STRIDE, int FORM, int X_C, int N_THREADS>
struct Input : Carrier<STORED == 3 ? 16 : STORED, N_THREADS, SIDE * STRIDE, R * STRIDE, 1, STRIDE == 1> {
  static constexpr int FULL = SIDE * STRIDE;
  static constexpr bool ADDS = FORM == JOINT && X_C > 0;
  using Base = Carrier<STORED == 3 ? 16 : STORED, N_THREADS, FULL, R * STRIDE, 1, STRIDE == 1>;
  uint4 carried[Base::EACH], more[ADDS ? Base::EACH : 1];
  unsigned inside;  // a bit for each pixel that is inside the image; the others stay zero

  __device__ void fetch(const bf16* x, const bf16* short_x, int image, int row) {
    inside = 0;
#pragma unroll
    for (int e = 0; e < Base::EACH; e++) {
      int r = row * STRIDE - 1 + Base::line(e), c = Base::column(e);
      carried[e] = {0, 0, 0, 0};
      if (Base::is_one(e) && (unsigned)r < FULL) {
        inside |= 1u << e;
        const bf16* p = x + ((image * FULL + r) * FULL + c) * STORED + Base::part();
        if constexpr (STORED != 3) {
          carried[e] = load<uint4>(p);
          if constexpr (ADDS) more[e] = shortcut<STORED, X_C, FULL>(short_x, image, r, c, Base::part());
        } else if (Base::part() == 0) {
          carried[e].x = p[0] | (unsigned)p[1] << 16;
          carried[e].y = p[2];
        }
      }
    }
  }

  __device__ void store(char* tile, const float* scale, const float* shift, bf16* out, int image, int row) {
    float a[8], b[8];
    if (FORM != FINISHED) read(a, scale + Base::part()), read(b, shift + Base::part());
#pragma unroll
    for (int e = 0; e < Base::EACH; e++) {
      if (FORM != FINISHED && inside >> e & 1) {
        int r = Base::line(e) - 1;
        carried[e] = joined<ADDS>(carried[e], more[ADDS ? e : 0], a, b);
        if (FORM == JOINT && r >= 0 && r < R * STRIDE)  // other blocks write the rows above and below
          *(uint4*)(out + ((image * FULL + row * STRIDE + r) * FULL + Base::column(e)) * STORED + Base::part()) = carried[e];
      }
      Base::put(tile, e, carried[e]);
    }
  }
};

// dy for the rows [row, row + R), with a border of BEFORE and AFTER pixels. Loads SOME of the C channels, those that g and y point
// to.
template <int C, int SOME, int SIDE, int R, int BEFORE, int AFTER, int N_THREADS>
struct Gradient : Carrier<SOME, N_THREADS, SIDE, R, BEFORE, AFTER> {
  using Base = Carrier<SOME, N_THREADS, SIDE, R, BEFORE, AFTER>;
  uint4 gs[Base::EACH], ys[Base::EACH];
  unsigned inside;

  __device__ void fetch(const bf16* g, const bf16* y, int image, int row) {
    inside = 0;
#pragma unroll
    for (int e = 0; e < Base::EACH; e++) {
      int r = row - BEFORE + Base::line(e);
      if (Base::is_one(e) && (unsigned)r < SIDE) {
        int from = ((image * SIDE + r) * SIDE + Base::column(e)) * C + Base::part();
        inside |= 1u << e;
        gs[e] = load<uint4>(g + from), ys[e] = load<uint4>(y + from);
      }
    }
  }

  __device__ void store(char* tile, const float* of_g, const float* of_y, const float* constant) {
    float a[8], b[8], c[8];
    read(a, of_g + Base::part()), read(b, of_y + Base::part()), read(c, constant + Base::part());
#pragma unroll
    for (int e = 0; e < Base::EACH; e++) {
      uint4 v = {0, 0, 0, 0};
      unsigned *to = (unsigned*)&v, *gp = (unsigned*)&gs[e], *yp = (unsigned*)&ys[e];
      if (inside >> e & 1)
#pragma unroll
        for (int k = 0; k < 4; k++)
          to[k] = pack(a[2 * k] * low(gp[k]) + (b[2 * k] * low(yp[k]) + c[2 * k]),
                       a[2 * k + 1] * high(gp[k]) + (b[2 * k + 1] * high(yp[k]) + c[2 * k + 1]));
      Base::put(tile, e, v);
    }
  }
};

// The product of a tile with the weights, and which part of it a warp computes: 16 of the N channels of the result, as two pieces
// of 8, and UP groups of 16 pixels. The groups are below each other; a group is half a row of an image with 32 columns, or two rows
// of an image with 8 columns. In each piece, thread `lane` has two channels of pixel lane / 4 in [0] and [1], and the same channels
// of the pixel eight further in [2] and [3]. Channels are assigned to pieces such that those of one thread are neighbors and can be
// read and written at once.

template <int N, int SIDE>
struct Share {
  static constexpr int PIXELS = ROWS * SIDE, WARPS = warps_for(N), THREADS = 32 * WARPS, ACROSS = N / 16;
  static constexpr int GROUPS = WARPS / ACROSS, UP = PIXELS / 16 / GROUPS, BESIDE = SIDE > 16 ? SIDE / 16 : 1;
  static __device__ int group() { return threadIdx.x / 32 / ACROSS; }
  static __device__ int first_pixel(int up) { return ((group() / BESIDE * UP + up) * BESIDE + group() % BESIDE) * 16; }
  static __device__ int pixel(int up) { return first_pixel(up) + threadIdx.x % 32 / 4; }
  static __device__ int channel(int piece) { return (threadIdx.x / 32 % ACROSS * 4 + threadIdx.x % 4) * 4 + 2 * piece; }
};

// The channels of a pixel that a thread has in one row of both pieces, two per word.
struct alignas(8) Channels { unsigned pair[2]; };

// Weights are stored as float32 (output channel, tap, input channel). The products need them in bf16 in the order in which threads
// load them: for each tap, each sixteen of the K input channels and each sixteen of the N output channels, two pairs of pairs per
// thread. A job packs one layer for one direction. `back` is the backward direction, from output to input channels with the taps
// reversed.
struct Job { const float* from; uint2* to; long long K, N, stored, back; };  // K is 16 if 3 channels are stored

// This is the first launch, so it also clears the buffers to which later launches add.
extern "C" __global__ void __launch_bounds__(256) pack_weights(const Job* jobs, float* cleared, int n_cleared) {
  for (int i = (blockIdx.y * gridDim.x + blockIdx.x) * 256 + threadIdx.x; i < n_cleared; i += gridDim.y * gridDim.x * 256)
    cleared[i] = 0.f;
  Job job = jobs[blockIdx.y];
  int i = blockIdx.x * 256 + threadIdx.x, K = job.K, N = job.N, stored = job.stored;
  if (i >= 9 * K * N / 4) return;
  int lane = i / 2 % 32, step = i / 64 / (N / 16), tap = step * 16 / K, column = lane / 4;
  int n = i / 64 % (N / 16) * 16 + column / 2 * 4 + i % 2 * 2 + column % 2, k = step * 16 % K + lane % 4 * 2;
  auto weight = [&](int k) {
    if (job.back) return job.from[(k * 9 + 8 - tap) * N + n];
    return k < stored ? job.from[(n * 9 + tap) * stored + k] : 0.f;
  };
  job.to[i] = make_uint2(pack(weight(k), weight(k + 1)), pack(weight(k + 8), weight(k + 9)));
}

// Starts to copy all packed weights of a layer to shared memory.
template <int K, int N, int N_THREADS>
__device__ const uint4* bring_weights(const uint4* w) {
  uint4* here = (uint4*)room();
  for (int i = threadIdx.x; i < 9 * K * N / 8; i += N_THREADS) copy(here + i, w + i);
  return here;
}

__device__ void multiply_add(float (&total)[2][4], const unsigned (&a)[4], uint4 b) {
  multiply_add(total[0], a, b.x, b.y);
  multiply_add(total[1], a, b.z, b.w);
}

// Adds the products of all taps; each tap reads the pixels at another offset in the tile. In the backward pass through a stride of
// two, each pixel of dy contributes to SPREAD² = 4 pixels of the result, and each tap to one of them: total[2·p + q] belongs to
// (2·row + p, 2·column + q). In this case the tile has a border only after the last row and column.
template <int K, int N, int SIDE, int STRIDE, int SPREAD>
__device__ void multiply(float (&total)[SPREAD * SPREAD][Share<N, SIDE>::UP][2][4], const char* tile, const uint4* weights) {
  using S = Share<N, SIDE>;
  constexpr int W = SPREAD == 1 ? bordered(SIDE, STRIDE) : SIDE + 1, AT_ONCE = SPREAD == 1 ? 1 : 3, STEPS = K / 16;
  int lane = threadIdx.x % 32;
  unsigned start[S::UP];  // address of this thread's row of eight numbers
#pragma unroll
  for (int up = 0; up < S::UP; up++) {
    int pixel = S::first_pixel(up) + lane % 16;
    start[up] = at(tile + (pixel / SIDE * STRIDE * W + pixel % SIDE * STRIDE) * bytes_of(K) + lane / 16 * 16);
  }
  const uint4* mine = weights + threadIdx.x / 32 % S::ACROSS * 32 + lane;
#pragma unroll AT_ONCE
  for (int row = 0; row < 3; row++)
#pragma unroll
    for (int column = 0; column < 3; column++) {
      int away = row / SPREAD * W + column / SPREAD, which = SPREAD == 1 ? 0 : (row + 1) % 2 * 2 + (column + 1) % 2;
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        uint4 b = mine[((row * 3 + column) * STEPS + step) * (N / 16) * 32];
#pragma unroll
        for (int up = 0; up < S::UP; up++) {
          unsigned a[4];
          load_matrices(a, start[up] + away * bytes_of(K) + step * 32);
          multiply_add(total[which][up], a, b);
        }
      }
    }
}

// The same for stride one. A row of the tile is loaded once for all three rows of taps, because each of them uses it for another
// row of the result.
template <int K, int N, int SIDE>
__device__ void multiply_rows(float (&total)[1][Share<N, SIDE>::UP][2][4], const char* tile, const uint4* weights) {
  using S = Share<N, SIDE>;
  constexpr int W = SIDE + 2, STEPS = K / 16, HIGH = SIDE == 8 ? 2 : 1;  // image rows of 16 pixels
  int lane = threadIdx.x % 32, pixel = S::first_pixel(0) + lane % 16;
  unsigned start = at(tile + (pixel / SIDE * W + pixel % SIDE) * bytes_of(K) + lane / 16 * 16);
  const uint4* mine = weights + threadIdx.x / 32 % S::ACROSS * 32 + lane;
#pragma unroll 1
  for (int column = 0; column < 3; column++)
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      uint4 b[3];  // for the three rows of taps
#pragma unroll
      for (int row = 0; row < 3; row++) b[row] = mine[((row * 3 + column) * STEPS + step) * (N / 16) * 32];
      unsigned a[4], before[4];
#pragma unroll
      for (int i = 0; i < S::UP + 2 / HIGH; i++) {
        load_matrices(a, start + (i * HIGH * W + column) * bytes_of(K) + step * 32);
        if (HIGH == 1) {
#pragma unroll
          for (int row = 0; row < 3; row++)
            if (i >= row && i - row < S::UP) multiply_add(total[0][i - row], a, b[row]);
        } else {  // two image rows: the middle taps use the second of them and the first of the next two
          if (i > 0) {
            unsigned middle[4] = {before[1], a[0], before[3], a[2]};
            multiply_add(total[0][i - 1], middle, b[1]);
            multiply_add(total[0][i - 1], a, b[2]);
          }
          if (i < S::UP) multiply_add(total[0][i], a, b[0]);
#pragma unroll
          for (int k = 0; k < 4; k++) before[k] = a[k];
        }
      }
    }
}

// Adds the sums over pixels of a block's warps to the totals in global memory. Each of GROUPS warps has written its 2N sums to
// `part`. Atomic additions in shared memory would be slower, because they are compare-and-swap loops.
template <int N, int GROUPS>
__device__ void add_parts(const float (*part)[2 * N], float* sums, int T) {
  __syncthreads();
  if (int i = threadIdx.x; i < 2 * N) {
    float total = 0.f;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) total += part[group][i];
    atomicAdd(sums + i / N * T + i % N, total);
  }
}

// Adds the sums over pixels of two values per result (first, second) from registers to the totals in global memory.
template <int N, int SIDE>
__device__ void add_sums(float (&first)[2][2], float (&second)[2][2], float* sums, int T) {
  using S = Share<N, SIDE>;
  __shared__ float part[S::GROUPS][2 * N];
  float* mine = part[S::group()];
#pragma unroll
  for (int piece = 0; piece < 2; piece++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
      for (int far = 4; far < 32; far *= 2) {
        first[piece][j] += __shfl_xor_sync(~0u, first[piece][j], far);
        second[piece][j] += __shfl_xor_sync(~0u, second[piece][j], far);
      }
      if (threadIdx.x % 32 < 4) mine[S::channel(piece) + j] = first[piece][j], mine[N + S::channel(piece) + j] = second[piece][j];
    }
  add_parts<N, S::GROUPS>(part, sums, T);
}

// Convolution: y = x * w, and the sums of y. FORM, short_x and out are as in `Input`. SIDE is the height and width of y.
template <int IN, int OUT, int SIDE, int STRIDE, int FORM, int X_C>
__global__ void __launch_bounds__(32 * warps_for(OUT))
    convolve(const bf16* x, const uint4* w, bf16* y, float* sums, const float* x_sums, const float* x_gamma, const float* x_beta,
             const bf16* short_x, bf16* out, int x_P, int T) {
  constexpr int K = IN == 3 ? 16 : IN, TILES = SIDE / ROWS;
  using S = Share<OUT, SIDE>;
  int t = blockIdx.x, image = t / TILES, row = t % TILES * ROWS;
  Input<IN, SIDE, ROWS, STRIDE, FORM, X_C, S::THREADS> input;
  __shared__ __align__(16) char tile[input.BYTES];
  __shared__ __align__(16) float scale[K], shift[K];
  float first[2][2] = {}, second[2][2] = {};
  const uint4* weights = bring_weights<K, OUT, S::THREADS>(w);
  input.clear_sides(tile);
  take_turn();
  input.fetch(x, short_x, image, row);
  if (FORM != FINISHED) scale_and_shift<K>(scale, shift, x_sums, x_gamma, x_beta, T, x_P);
  await_copies();
  __syncthreads();
  input.store(tile, scale, shift, out, image, row);
  __syncthreads();
  float total[1][S::UP][2][4] = {};
  if constexpr (STRIDE == 1)
    multiply_rows<K, OUT, SIDE>(total, tile, weights);
  else
    multiply<K, OUT, SIDE, STRIDE, 1>(total, tile, weights);
#pragma unroll
  for (int up = 0; up < S::UP; up++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      Channels made;
#pragma unroll
      for (int piece = 0; piece < 2; piece++) {
        unsigned pair = made.pair[piece] = pack(total[0][up][piece][2 * half], total[0][up][piece][2 * half + 1]);
        first[piece][0] += low(pair), second[piece][0] += low(pair) * low(pair);
        first[piece][1] += high(pair), second[piece][1] += high(pair) * high(pair);
      }
      *(Channels*)(y + (t * S::PIXELS + S::pixel(up) + 8 * half) * OUT + S::channel(0)) = made;
    }
  add_sums<OUT, SIDE>(first, second, sums, T);
}

// The gradient of a convolution's input, multiplied by the derivative of that input's relu: x_g, the gradient of the result of the
// previous batch norm, and its sums. (g, y, sums, grads, gamma) belong to the batch norm after the convolution, x_… to the one
// before it. At the START of a residual block, the input is x_out, the sum of a branch and a shortcut, and `skip`, the gradient of
// this block's shortcut, is added. SIDE is the height and width of y; x is STRIDE times as large.
template <int IN, int OUT, int SIDE, int STRIDE, bool START>
__global__ void __launch_bounds__(32 * warps_for(IN))
    input_grad(const bf16* g, const bf16* y, const float* sums, const float* grads, const float* gamma, const uint4* w,
               const bf16* x_y, const float* x_sums, const float* x_gamma, const float* x_beta, const bf16* x_out,
               const bf16* skip, bf16* x_g, float* x_grads, int P, int x_P, int T) {
  constexpr int TILES = SIDE / ROWS, FULL = SIDE * STRIDE, EACH = STRIDE * STRIDE;
  using S = Share<IN, SIDE>;
  int t = blockIdx.x, image = t / TILES, row = t % TILES * ROWS;
  Gradient<OUT, OUT, SIDE, ROWS, STRIDE == 1, 1, S::THREADS> gradient;
  __shared__ __align__(16) char tile[gradient.BYTES];
  __shared__ __align__(16) float of_g[OUT], of_y[OUT], constant[OUT];
  __shared__ float scale[IN], shift[IN], rstd[IN], middle[IN];
  float first[2][2] = {}, second[2][2] = {};
  const uint4* weights = bring_weights<OUT, IN, S::THREADS>(w);
  gradient.clear_sides(tile);
  take_turn();
  gradient.fetch(g, y, image, row);
  backward_affine<OUT>(of_g, of_y, constant, sums, grads, gamma, T, P);
  if (int c = threadIdx.x; c < IN) {
    Statistics s = statistics(x_sums, c, T, x_P);
    rstd[c] = s.rstd, middle[c] = -s.mean * s.rstd;
    if (!START) scale[c] = x_gamma[c] * s.rstd, shift[c] = x_beta[c] - s.mean * scale[c];
  }
  await_copies();
  __syncthreads();
  gradient.store(tile, of_g, of_y, constant);
  __syncthreads();
  auto here = [&](int which, int q) {  // offset of the pixel of x that belongs to pixel q of the tile
    int r = (row + q / SIDE) * STRIDE + which / STRIDE, c = q % SIDE * STRIDE + which % STRIDE;
    return ((image * FULL + r) * FULL + c) * IN + S::channel(0);
  };
  using Some = Channels;
  Some raw[EACH][S::UP][2], out[EACH][S::UP][2], more[S::UP][2];  // loaded before they are needed
#pragma unroll
  for (int up = 0; up < S::UP; up++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int q = S::pixel(up) + 8 * half;
      if (START) more[up][half] = load<Some>(skip + (t * S::PIXELS + q) * OUT + (OUT - IN) / 2 + S::channel(0));
#pragma unroll
      for (int which = 0; which < EACH; which++) {
        raw[which][up][half] = load<Some>(x_y + here(which, q));
        if (START) out[which][up][half] = load<Some>(x_out + here(which, q));
      }
    }
  float total[EACH][S::UP][2][4] = {};
  if constexpr (STRIDE == 1)
    multiply_rows<OUT, IN, SIDE>(total, tile, weights);
  else
    multiply<OUT, IN, SIDE, 1, STRIDE>(total, tile, weights);
#pragma unroll
  for (int which = 0; which < EACH; which++)
#pragma unroll
    for (int up = 0; up < S::UP; up++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        Some made;
#pragma unroll
        for (int piece = 0; piece < 2; piece++) {
          int c = S::channel(piece);
          float a = total[which][up][piece][2 * half], b = total[which][up][piece][2 * half + 1];
          float x0 = low(raw[which][up][half].pair[piece]), x1 = high(raw[which][up][half].pair[piece]);
          if (START) {
            unsigned o = out[which][up][half].pair[piece], m = more[up][half].pair[piece];
            if (which == 0) a += low(m), b += high(m);
            a = low(o) > 0.f ? a : 0.f, b = high(o) > 0.f ? b : 0.f;
          } else {
            a = x0 * scale[c] + shift[c] > 0.f ? a : 0.f, b = x1 * scale[c + 1] + shift[c + 1] > 0.f ? b : 0.f;
          }
          unsigned pair = made.pair[piece] = pack(a, b);
          first[piece][0] += low(pair), second[piece][0] += low(pair) * (x0 * rstd[c] + middle[c]);
          first[piece][1] += high(pair), second[piece][1] += high(pair) * (x1 * rstd[c + 1] + middle[c + 1]);
        }
        *(Some*)(x_g + here(which, S::pixel(up) + 8 * half)) = made;
      }
  add_sums<IN, SIDE>(first, second, x_grads, T);
}

// How `weight_grad` divides its work. In general a warp computes one tap. With 16 channels it has enough registers for a column of
// three taps, and it processes a band of the tile's rows, so that each row of x is loaded once for three rows of dy.
__device__ constexpr bool by_column(int K, int stride) { return K == 16 && stride == 1; }
constexpr int BANDS = 4;
__device__ constexpr int weight_warps(int K, int stride) { return by_column(K, stride) ? 3 * BANDS : 9; }

// Adds x^T · dy for one tap to total[SOME / 16 of the channels of dy][K / 8 of the channels of x].
template <int K, int SOME, int SIDE, int STRIDE, int PIXELS>
__device__ void add_tap(float (&total)[SOME / 16][K / 8][4], const char* tile, const char* dy) {
  constexpr int W = bordered(SIDE, STRIDE);
  int lane = threadIdx.x % 32, tap = threadIdx.x / 32;
#pragma unroll 2
  for (int q = 0; q < PIXELS; q += 16) {
    unsigned a[SOME / 16][4], b[4];
    int along = q + lane % 8 + lane / 16 * 8, pixel = q + lane % 16;
#pragma unroll
    for (int m = 0; m < SOME / 16; m++)
      load_transposed(a[m], at(dy + along * bytes_of(SOME) + m * 32 + lane / 8 % 2 * 16));
    int there = (pixel / SIDE * STRIDE + tap / 3) * W + pixel % SIDE * STRIDE + tap % 3;
#pragma unroll
    for (int n = 0; n < K / 16; n++) {
      load_transposed(b, at(tile + there * bytes_of(K) + n * 32 + lane / 16 * 16));
#pragma unroll
      for (int m = 0; m < SOME / 16; m++) {
        multiply_add(total[m][2 * n], a[m], b[0], b[1]);
        multiply_add(total[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// The same with 16 channels, for a column of taps and a band of the tile's R rows: adds to total[row of the taps].
template <int SIDE, int R>
__device__ void add_column(float (&total)[3][2][4], const char* tile, const char* dy) {
  constexpr int HIGH = R / BANDS, W = SIDE + 2;
  int lane = threadIdx.x % 32, column = threadIdx.x / 32 % 3, top = threadIdx.x / 96 * HIGH;
#pragma unroll
  for (int left = 0; left < SIDE; left += 16) {
    unsigned a[HIGH][4], b[4];
#pragma unroll
    for (int i = 0; i < HIGH + 2; i++) {
      load_transposed(b, at(tile + ((top + i) * W + left + column + lane % 16) * bytes_of(16) + lane / 16 * 16));
      if (i < HIGH)
        load_transposed(a[i], at(dy + ((top + i) * SIDE + left + lane % 8 + lane / 16 * 8) * bytes_of(16) + lane / 8 % 2 * 16));
#pragma unroll
      for (int row = 0; row < 3; row++)
        if (i >= row && i - row < HIGH) {
          multiply_add(total[row][0], a[i - row], b[0], b[1]);
          multiply_add(total[row][1], a[i - row], b[2], b[3]);
        }
    }
  }
}

// Adds the gradient of the weights to dw. A block processes several tiles and at most 32 output channels (selected by blockIdx.y),
// limited by the number of registers. x is as in `convolve` (not JOINT), g and y as in `input_grad`.
template <int IN, int OUT, int SIDE, int STRIDE, int FORM>
__global__ void __launch_bounds__(32 * weight_warps(IN == 3 ? 16 : IN, STRIDE))
    weight_grad(const bf16* g, const bf16* y, const float* sums, const float* grads, const float* gamma, const bf16* x,
                const float* x_sums, const float* x_gamma, const float* x_beta, float* dw, int P, int x_P, int T) {
  // Large tiles, because every tile waits for memory once. With a stride of two the tiles of x are already large.
  constexpr int R = SIDE == 16 && STRIDE == 1 ? 16 : ROWS, PIXELS = R * SIDE, TILES = SIDE / R;
  constexpr int K = IN == 3 ? 16 : IN, SOME = OUT < 32 ? OUT : 32, THREADS = 32 * weight_warps(K, STRIDE);
  constexpr bool COLUMNS = by_column(K, STRIDE);
  int from = blockIdx.y * SOME;
  Input<IN, SIDE, R, STRIDE, FORM, 0, THREADS> input;
  Gradient<OUT, SOME, SIDE, R, 0, 0, THREADS> gradient;
  __shared__ __align__(16) char tile[input.BYTES];
  __shared__ __align__(16) char dy[gradient.BYTES];
  __shared__ __align__(16) float scale[K], shift[K], of_g[OUT], of_y[OUT], constant[OUT];
  input.clear_sides(tile);
  float total[COLUMNS ? 3 : SOME / 16][K / 8][4] = {};
  for (int t = -1, next = blockIdx.x;; t = next, next += gridDim.x) {  // tile t is in shared memory, the next one is being loaded
    if (next < P / PIXELS) {
      input.fetch(x, nullptr, next / TILES, next % TILES * R);
      gradient.fetch(g + from, y + from, next / TILES, next % TILES * R);
    }
    if (t >= 0) {
      if constexpr (COLUMNS)
        add_column<SIDE, R>(total, tile, dy);
      else
        add_tap<K, SOME, SIDE, STRIDE, PIXELS>(total, tile, dy);
    } else {
      backward_affine<OUT>(of_g, of_y, constant, sums, grads, gamma, T, P);
      if (FORM == RAW) scale_and_shift<K>(scale, shift, x_sums, x_gamma, x_beta, T, x_P);
    }
    __syncthreads();
    if (next >= P / PIXELS) break;
    input.store(tile, scale, shift, nullptr, 0, 0);
    gradient.store(dy, of_g + from, of_y + from, constant + from);
    __syncthreads();
  }
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if constexpr (COLUMNS) {  // add the bands in shared memory, then to global memory
    __shared__ float gathered[16 * 9 * IN];
    for (int band = 0; band < BANDS; band++) {
      if (warp / 3 == band)
#pragma unroll
        for (int row = 0; row < 3; row++)
#pragma unroll
          for (int n = 0; n < 2; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
              int co = lane / 4 + k / 2 * 8, ci = n * 8 + lane % 4 * 2 + k % 2, to = (co * 9 + row * 3 + warp % 3) * IN + ci;
              if (ci < IN) gathered[to] = (band > 0 ? gathered[to] : 0.f) + total[row][n][k];
            }
      __syncthreads();
    }
    for (int i = threadIdx.x; i < 16 * 9 * IN; i += THREADS) atomicAdd(dw + i, gathered[i]);
  } else {
#pragma unroll
    for (int m = 0; m < SOME / 16; m++)
#pragma unroll
      for (int n = 0; n < K / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          int co = from + m * 16 + lane / 4 + 8 * half, ci = n * 8 + lane % 4 * 2;
          add_two(dw + (co * 9 + warp) * IN + ci, total[m][n][2 * half], total[m][n][2 * half + 1]);
        }
  }
}

// The end of the network: out = relu(bn(y) + shortcut of x), and its mean over the pixels of each image. One block per image, one
// thread per eight channels. Since the sums of all layers are complete, it also updates all running statistics; y is the last
// layer.
template <int C, int X_C, int SIDE>
__global__ void __launch_bounds__(256) pool(const bf16* y, const float* sums, const float* gamma, const float* beta,
                                            const bf16* x, bf16* out, float* means, const Average* layers, int n_layers,
                                            int P, int T) {
  constexpr int PARTS = C / 8;
  __shared__ float scale[C], shift[C], part_means[8][C];
  take_turn();
  for (int i = blockIdx.x; i < n_layers; i += gridDim.x) update(layers[i], sums - layers[n_layers - 1].first, gridDim.x, T);
  scale_and_shift<C>(scale, shift, sums, gamma, beta, T, P);
  __syncthreads();
  int part = threadIdx.x % PARTS * 8;
  float total[8] = {};
  for (int q = threadIdx.x / PARTS; q < SIDE * SIDE; q += 256 / PARTS) {
    int here = (blockIdx.x * SIDE * SIDE + q) * C + part;
    uint4 more = shortcut<C, X_C, SIDE>(x, blockIdx.x, q / SIDE, q % SIDE, part);
    uint4 v = joined<(X_C > 0)>(load<uint4>(y + here), more, scale + part, shift + part);
    *(uint4*)(out + here) = v;
    const unsigned* of = (const unsigned*)&v;
#pragma unroll
    for (int k = 0; k < 4; k++) total[2 * k] += low(of[k]), total[2 * k + 1] += high(of[k]);
  }
#pragma unroll
  for (int k = 0; k < 8; k++) {
#pragma unroll
    for (int far = PARTS; far < 32; far *= 2) total[k] += __shfl_xor_sync(~0u, total[k], far);
    if (threadIdx.x % 32 < PARTS) part_means[threadIdx.x / 32][part + k] = total[k];
  }
  __syncthreads();
  if (int i = threadIdx.x; i < C) {
    float mean = 0.f;
    for (int warp = 0; warp < 8; warp++) mean += part_means[warp][i];
    means[blockIdx.x * C + i] = mean / (SIDE * SIDE);
  }
}

// The start of the backward pass: g of the last batch norm and its sums, given the gradient of the features (float; the mean over
// pixels) or of the last feature map (MAP; bf16). One block per image, one thread per two channels.
template <int C, int SIDE, bool MAP>
__global__ void __launch_bounds__(256) last_grad(const void* grad, const bf16* out, const bf16* y, const float* sums, bf16* g,
                                                 float* grads, int P, int T) {
  __shared__ float part[512 / C][2 * C];
  take_turn();
  int c = threadIdx.x % (C / 2) * 2;
  Statistics s0 = statistics(sums, c, T, P), s1 = statistics(sums, c + 1, T, P);
  float a = 0, b = 0;
  if constexpr (!MAP) {
    const float* of_mean = (const float*)grad + blockIdx.x * C + c;
    a = of_mean[0] / (SIDE * SIDE), b = of_mean[1] / (SIDE * SIDE);
  }
  float first0 = 0, first1 = 0, second0 = 0, second1 = 0;
  for (int q = threadIdx.x / (C / 2); q < SIDE * SIDE; q += 512 / C) {
    int here = (blockIdx.x * SIDE * SIDE + q) * C + c;
    unsigned o = *(const unsigned*)(out + here), raw = *(const unsigned*)(y + here);
    if constexpr (MAP) {
      unsigned of_pixel = *(const unsigned*)((const bf16*)grad + here);
      a = low(of_pixel), b = high(of_pixel);
    }
    unsigned pair = pack(low(o) > 0.f ? a : 0.f, high(o) > 0.f ? b : 0.f);
    *(unsigned*)(g + here) = pair;
    first0 += low(pair), second0 += low(pair) * (low(raw) - s0.mean) * s0.rstd;
    first1 += high(pair), second1 += high(pair) * (high(raw) - s1.mean) * s1.rstd;
  }
  float* mine = part[threadIdx.x / (C / 2)];
  mine[c] = first0, mine[c + 1] = first1, mine[C + c] = second0, mine[C + c + 1] = second1;
  add_parts<C, 512 / C>(part, grads, T);
}
