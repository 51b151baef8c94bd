// Views of small images, a block of threads for each: the operations of ops.py one after another in shared memory, where torch
// makes a pass over all images for each of them, chosen or not. Compiled without fused multiply-adds: rounding is as in ops.py.
//
// Images lie as (image, channel, row, column); SIDE is the height and the width.

using uchar = unsigned char;
constexpr int THREADS = 256;

// The codes of ops.Op
enum { IDENTITY, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE, BRIGHTNESS, COLOUR, CONTRAST, SHARPNESS, POSTERIZE, SOLARIZE,
       SOLARIZE_ADD, AUTOCONTRAST, EQUALIZE, INVERT };

__device__ uchar blend(float start, float x, float factor) {
  return (uchar)fminf(fmaxf(start + factor * (x - start), 0.f), 255.f);
}

__device__ int grey_level(const uchar* image, int i, int P) {
  return (19595 * image[i] + 38470 * image[P + i] + 7471 * image[2 * P + i] + 0x8000) >> 16;
}

struct Matrix { float xx, xy, x0, yx, yy, y0; };  // from output to input positions

template <int SIDE>
__device__ Matrix matrix_of(int op, float v) {
  Matrix m = {1.f, 0.f, 0.f, 0.f, 1.f, 0.f};
  if (op == SHEAR_X) m.xy = v;
  if (op == SHEAR_Y) m.yx = v;
  if (op == TRANSLATE_X) m.x0 = -v;
  if (op == TRANSLATE_Y) m.y0 = -v;
  if (op == ROTATE) {
    float angle = v * (float)(3.14159265358979323846 / 180), c = cosf(angle), s = sinf(angle), h = SIDE / 2.f;
    m = {c, -s, h - h * c + h * s, s, c, h - h * s - h * c};
  }
  return m;
}

template <int SIDE>
__device__ void fetch(const uchar* from, uchar* to, Matrix m, uchar fill) {
  constexpr int P = SIDE * SIDE;
  for (int i = threadIdx.x; i < P; i += THREADS) {
    float column = i % SIDE + 0.5f, row = i / SIDE + 0.5f;
    float x = m.xx * column + (m.xy * row + m.x0), y = m.yx * column + (m.yy * row + m.y0);
    bool inside = x >= 0.f && x < SIDE && y >= 0.f && y < SIDE;
    int source = inside ? (int)y * SIDE + (int)x : 0;
    for (int c = 0; c < 3; c++) to[c * P + i] = inside ? from[c * P + source] : fill;
  }
}

template <int SIDE>
__device__ void smooth_blend(const uchar* from, uchar* to, float factor) {
  constexpr int P = SIDE * SIDE;
  for (int i = threadIdx.x; i < 3 * P; i += THREADS) {
    int column = i % SIDE, row = i % P / SIDE;
    float x = from[i], start = x;
    if (column > 0 && column < SIDE - 1 && row > 0 && row < SIDE - 1) {
      int box = 0;
      for (int r = -SIDE; r <= SIDE; r += SIDE) box += from[i + r - 1] + from[i + r] + from[i + r + 1];
      start = rintf((box + 4 * from[i]) / 13.f);
    }
    to[i] = blend(start, x, factor);
  }
}

struct Table {  // what a channel's levels become
  uchar of[256];
  int count[256], low, high;
};

// The levels that a channel has, and how often.
template <int SIDE>
__device__ void count_levels(const uchar* image, Table* tables) {
  constexpr int P = SIDE * SIDE;
  for (int i = threadIdx.x; i < 3 * 256; i += THREADS) tables[i / 256].count[i % 256] = 0;
  if (threadIdx.x < 3) tables[threadIdx.x].low = 255, tables[threadIdx.x].high = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < 3 * P; i += THREADS) {
    Table& t = tables[i / P];
    atomicAdd(&t.count[image[i]], 1);
    atomicMin(&t.low, (int)image[i]), atomicMax(&t.high, (int)image[i]);
  }
  __syncthreads();
}

__device__ int mean_grey(const uchar* image, int P, int* sum) {
  if (threadIdx.x == 0) *sum = 0;
  __syncthreads();
  int mine = 0;
  for (int i = threadIdx.x; i < P; i += THREADS) mine += grey_level(image, i, P);
  atomicAdd(sum, mine);
  __syncthreads();
  return (2 * *sum + P) / (2 * P);
}

// Fills the tables; a thread for each level.
template <int SIDE>
__device__ void make_tables(const uchar* image, int op, float v, Table* tables, int* sum) {
  constexpr int P = SIDE * SIDE;
  int l = threadIdx.x, mean = op == CONTRAST ? mean_grey(image, P, sum) : 0;
  if (op == AUTOCONTRAST || op == EQUALIZE) count_levels<SIDE>(image, tables);
  for (int c = 0; c < 3; c++) {
    Table& t = tables[c];
    int value = l;
    if (op == BRIGHTNESS) value = blend(0.f, l, v);
    if (op == CONTRAST) value = blend(mean, l, v);
    if (op == POSTERIZE) {
      int dropped = 8 - (int)fminf(fmaxf(v, 0.f), 8.f);
      value = l >> dropped << dropped;
    }
    if (op == SOLARIZE) value = l < v ? l : 255 - l;
    if (op == SOLARIZE_ADD && l < 128) value = min(max(l + (int)v, 0), 255);
    if (op == INVERT) value = 255 - l;
    if (op == AUTOCONTRAST && t.high > t.low) {
      double scale = 255. / (t.high - t.low);
      value = (int)fmin(fmax(l * scale + -(double)t.low * scale, 0.), 255.);
    }
    if (op == EQUALIZE) {
      int step = (P - t.count[t.high]) / 255, darker = 0;
      for (int k = 0; k < l; k++) darker += t.count[k];
      if (step > 0) value = min((step / 2 + darker) / step, 255);
    }
    t.of[l] = value;
  }
}

// policies.apply_draw with the nearest pixel: `steps` operations in a row.
template <int SIDE>
__global__ void __launch_bounds__(THREADS) apply_draw(const uchar* x, const long long* ops, const float* values, uchar* out,
                                                      int steps, int fill) {
  constexpr int P = SIDE * SIDE;
  __shared__ uchar room[2][3 * P];
  __shared__ Table tables[3];
  __shared__ int sum;
  uchar *image = room[0], *other = room[1];
  x += blockIdx.x * 3 * P, out += blockIdx.x * 3 * P;
  for (int i = threadIdx.x; i < 3 * P; i += THREADS) image[i] = x[i];
  for (int step = 0; step < steps; step++) {
    int op = ops[blockIdx.x * steps + step];
    float v = values[blockIdx.x * steps + step];
    __syncthreads();
    if (op == IDENTITY) continue;
    if (op <= ROTATE || op == SHARPNESS) {
      if (op == SHARPNESS) smooth_blend<SIDE>(image, other, v);
      else fetch<SIDE>(image, other, matrix_of<SIDE>(op, v), fill);
      uchar* swapped = image;
      image = other, other = swapped;
    } else if (op == COLOUR) {
      for (int i = threadIdx.x; i < P; i += THREADS) {
        float grey = grey_level(image, i, P);
        for (int c = 0; c < 3; c++) image[c * P + i] = blend(grey, image[c * P + i], v);
      }
    } else {
      make_tables<SIDE>(image, op, v, tables, &sum);
      __syncthreads();
      for (int i = threadIdx.x; i < 3 * P; i += THREADS) image[i] = tables[i / P].of[image[i]];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 3 * P; i += THREADS) out[i] = image[i];
}

// Floats in [0, 1]

__device__ float luminance(float r, float g, float b) { return 0.2989f * r + 0.587f * g + 0.114f * b; }

__device__ float clamp01(float x) { return fminf(fmaxf(x, 0.f), 1.f); }

// The sum of a value per thread, for all threads.
__device__ float sum_of(float mine, float* warps) {
  for (int far = 16; far; far /= 2) mine += __shfl_xor_sync(~0u, mine, far);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  float total = 0.f;
  for (int w = 0; w < THREADS / 32; w++) total += warps[w];
  return total;
}

__device__ void shift_hue(float& r, float& g, float& b, float hue) {
  float value = fmaxf(fmaxf(r, g), b), chroma = value - fminf(fminf(r, g), b), unit = chroma > 0.f ? chroma : 1.f;
  float sixths = (value == r ? (g - b) / unit : value == g ? 2 + (b - r) / unit : 4 + (r - g) / unit) + 6 * hue;
  float* to[3] = {&r, &g, &b};
  for (int c = 0; c < 3; c++) {
    float phase = fmodf(sixths + (5 - 2 * c), 6.f);
    if (phase < 0.f) phase += 6.f;
    *to[c] = value - chroma * clamp01(2 - fabsf(phase - 2));
  }
}

// One direction of the blur: `along` is the distance of neighbours, `place` the place in their line; reflected at the border.
template <int SIDE>
__device__ float blurred(const float* x, int place, int along, const float* taps) {
  constexpr int RADIUS = 6 < SIDE ? 6 : SIDE - 1;
  float total = 0.f;
  for (int k = -RADIUS; k <= RADIUS; k++) {
    int q = place + k;
    q = q < 0 ? -q : q >= SIDE ? 2 * SIDE - 2 - q : q;
    total += taps[k + RADIUS] * x[(q - place) * along];
  }
  return total;
}

// policies.apply_sim of to_float(x): colour jitter in each sample's order, greyscale, blur.
template <int SIDE>
__global__ void __launch_bounds__(THREADS) apply_sim(const uchar* x, const bool* jittered, const float* factors,
                                                     const float* hues, const long long* orders, const bool* greys,
                                                     const float* sigmas, float* out) {
  constexpr int P = SIDE * SIDE, EACH = P / THREADS, RADIUS = 6 < SIDE ? 6 : SIDE - 1;
  __shared__ float image[3 * P], other[3 * P], warps[THREADS / 32], taps[2 * RADIUS + 1];
  int n = blockIdx.x;
  x += n * 3 * P, out += n * 3 * P;
  float r[EACH], g[EACH], b[EACH];
  for (int e = 0; e < EACH; e++) {
    int i = e * THREADS + threadIdx.x;
    r[e] = x[i] * (1.f / 255), g[e] = x[P + i] * (1.f / 255), b[e] = x[2 * P + i] * (1.f / 255);
  }
  for (int turn = 0; turn < 4 && jittered[n]; turn++) {
    int kind = orders[n * 4 + turn];
    float factor = kind < 3 ? factors[n * 3 + kind] : 1.f, mean = 0.f;
    if (kind == 1) {
      for (int e = 0; e < EACH; e++) mean += luminance(r[e], g[e], b[e]);
      mean = sum_of(mean, warps) / P;
    }
    for (int e = 0; e < EACH; e++) {
      if (kind == 3) {
        shift_hue(r[e], g[e], b[e], hues[n]);
        continue;
      }
      float start = kind == 0 ? 0.f : kind == 1 ? mean : luminance(r[e], g[e], b[e]);
      r[e] = clamp01(factor * r[e] + (1 - factor) * start);
      g[e] = clamp01(factor * g[e] + (1 - factor) * start);
      b[e] = clamp01(factor * b[e] + (1 - factor) * start);
    }
  }
  for (int e = 0; e < EACH; e++) {
    int i = e * THREADS + threadIdx.x;
    if (greys[n]) r[e] = g[e] = b[e] = luminance(r[e], g[e], b[e]);
    image[i] = r[e], image[P + i] = g[e], image[2 * P + i] = b[e];
  }
  float sigma = sigmas[n];
  if (sigma > 0.f) {
    if (threadIdx.x == 0) {
      float total = 0.f;
      for (int k = -RADIUS; k <= RADIUS; k++) total += taps[k + RADIUS] = expf(-0.5f * (k / sigma) * (k / sigma));
      for (int k = 0; k <= 2 * RADIUS; k++) taps[k] /= total;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 3 * P; i += THREADS) other[i] = blurred<SIDE>(image + i, i % P / SIDE, SIDE, taps);
    __syncthreads();
    for (int i = threadIdx.x; i < 3 * P; i += THREADS) image[i] = blurred<SIDE>(other + i, i % SIDE, 1, taps);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 3 * P; i += THREADS) out[i] = image[i];
}
