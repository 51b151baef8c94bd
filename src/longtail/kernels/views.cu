// Augmentation with one block of threads per image. A block applies the operations of views/ops.py one after another to an image in
// shared memory (small images) or in a scratch buffer (large images); torch would pass over all images for every operation, whether
// a sample uses it or not. Compiled without fused multiply-adds, so that rounding is as in ops.py.
//
// Images have the layout (image, channel, row, column). SIDE is their height and width.

using uchar = unsigned char;
constexpr int SHARED = 40000;  // bytes of shared memory for images; SHARED_BYTES in views.py
template <int SIDE> constexpr int THREADS = SIDE <= 64 ? 256 : 1024;  // as in views.py

// The codes of views.ops.Op
enum { IDENTITY, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE, BRIGHTNESS, COLOR, CONTRAST, SHARPNESS, POSTERIZE, SOLARIZE,
       SOLARIZE_ADD, AUTOCONTRAST, EQUALIZE, INVERT };

__device__ uchar blend(float start, float x, float factor) {
  return (uchar)fminf(fmaxf(start + factor * (x - start), 0.f), 255.f);
}

__device__ int gray_level(const uchar* image, int i, int P) {
  return (19595 * image[i] + 38470 * image[P + i] + 7471 * image[2 * P + i] + 0x8000) >> 16;
}

struct Matrix { float xx, xy, x0, yx, yy, y0; };  // maps output positions to input positions

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

// Bilinear interpolation at (x, y); positions outside of the image take the pixels at the border.
template <int SIDE>
__device__ uchar between(const uchar* from, float x, float y) {
  x = fminf(fmaxf(x - 0.5f, 0.f), SIDE - 1.f), y = fminf(fmaxf(y - 0.5f, 0.f), SIDE - 1.f);
  int left = (int)x, top = (int)y, right = min(left + 1, SIDE - 1), below = min(top + 1, SIDE - 1);
  float u = x - left, v = y - top;
  const uchar *first = from + top * SIDE, *second = from + below * SIDE;
  float upper = (1 - u) * first[left] + u * first[right], lower = (1 - u) * second[left] + u * second[right];
  return (uchar)rintf((1 - v) * upper + v * lower);
}

template <int SIDE, bool BILINEAR>
__device__ void fetch(const uchar* from, uchar* to, Matrix m, uchar fill) {
  constexpr int P = SIDE * SIDE;
  for (int i = threadIdx.x; i < P; i += blockDim.x) {
    float column = i % SIDE + 0.5f, row = i / SIDE + 0.5f;
    float x = m.xx * column + (m.xy * row + m.x0), y = m.yx * column + (m.yy * row + m.y0);
    bool inside = x >= 0.f && x < SIDE && y >= 0.f && y < SIDE;
    int source = inside ? (int)y * SIDE + (int)x : 0;
    for (int c = 0; c < 3; c++) {
      uchar found = BILINEAR ? between<SIDE>(from + c * P, x, y) : from[c * P + source];
      to[c * P + i] = inside ? found : fill;
    }
  }
}

template <int SIDE>
__device__ void smooth_blend(const uchar* from, uchar* to, float factor) {
  constexpr int P = SIDE * SIDE;
  for (int i = threadIdx.x; i < 3 * P; i += blockDim.x) {
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

struct Table {  // lookup table of a channel
  uchar of[256];
  int count[256], low, high;
};

// Computes the histogram of each channel and its lowest and highest level. The extremes are found from the 256 counts, because
// atomic operations of all pixels on two words would be slow.
template <int SIDE>
__device__ void count_levels(const uchar* image, Table* tables) {
  constexpr int P = SIDE * SIDE;
  for (int i = threadIdx.x; i < 3 * 256; i += blockDim.x) tables[i / 256].count[i % 256] = 0;
  if (threadIdx.x < 3) tables[threadIdx.x].low = 255, tables[threadIdx.x].high = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < 3 * P; i += blockDim.x) atomicAdd(&tables[i / P].count[image[i]], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < 3 * 256; i += blockDim.x) {
    Table& t = tables[i / 256];
    if (t.count[i % 256]) atomicMin(&t.low, i % 256), atomicMax(&t.high, i % 256);
  }
  __syncthreads();
}

__device__ int mean_gray(const uchar* image, int P, int* sum) {
  if (threadIdx.x == 0) *sum = 0;
  __syncthreads();
  int mine = 0;
  for (int i = threadIdx.x; i < P; i += blockDim.x) mine += gray_level(image, i, P);
  atomicAdd(sum, mine);
  __syncthreads();
  return (2 * *sum + P) / (2 * P);
}

// Fills the tables, with one thread for each of the 256 levels.
template <int SIDE>
__device__ void make_tables(const uchar* image, int op, float v, Table* tables, int* sum) {
  constexpr int P = SIDE * SIDE;
  int l = threadIdx.x, mean = op == CONTRAST ? mean_gray(image, P, sum) : 0;
  if (op == AUTOCONTRAST || op == EQUALIZE) count_levels<SIDE>(image, tables);
  for (int c = 0; c < 3 && l < 256; c++) {
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

// policies.apply_draw: applies `steps` operations. `near` is a scratch buffer of two images per sample, used if they do not fit
// into shared memory.
template <int SIDE, bool BILINEAR>
__global__ void __launch_bounds__(THREADS<SIDE>) apply_draw(const uchar* x, const long long* ops, const float* values,
                                                                uchar* out, uchar* near, int steps, int fill) {
  constexpr int P = SIDE * SIDE;
  constexpr bool HERE = 6 * P <= SHARED;
  __shared__ uchar room[HERE ? 6 * P : 1];
  __shared__ Table tables[3];
  __shared__ int sum;
  uchar *image = HERE ? room : near + (size_t)blockIdx.x * 6 * P, *other = image + 3 * P;
  x += (size_t)blockIdx.x * 3 * P, out += (size_t)blockIdx.x * 3 * P;
  for (int i = threadIdx.x; i < 3 * P; i += blockDim.x) image[i] = x[i];
  for (int step = 0; step < steps; step++) {
    int op = ops[blockIdx.x * steps + step];
    float v = values[blockIdx.x * steps + step];
    __syncthreads();
    if (op == IDENTITY) continue;
    if (op <= ROTATE || op == SHARPNESS) {
      if (op == SHARPNESS) smooth_blend<SIDE>(image, other, v);
      else fetch<SIDE, BILINEAR>(image, other, matrix_of<SIDE>(op, v), fill);
      uchar* swapped = image;
      image = other, other = swapped;
    } else if (op == COLOR) {
      for (int i = threadIdx.x; i < P; i += blockDim.x) {
        float gray = gray_level(image, i, P);
        for (int c = 0; c < 3; c++) image[c * P + i] = blend(gray, image[c * P + i], v);
      }
    } else {
      make_tables<SIDE>(image, op, v, tables, &sum);
      __syncthreads();
      for (int i = threadIdx.x; i < 3 * P; i += blockDim.x) image[i] = tables[i / P].of[image[i]];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 3 * P; i += blockDim.x) out[i] = image[i];
}

// ops.resized_crop and to_uint8. A column of the grid for each image; the rows of the grid share its pixels.

struct Taps {  // the input pixels of a line of the box that contribute to an output pixel, with their weights
  int first, last;
  float center, slope;
  __device__ float weight(float middle) { return fmaxf(1 - fabsf(middle - center) * slope, 0.f); }
};

template <int SIZE>
__device__ Taps taps_of(int place, int length) {
  float scale = (float)length / SIZE, reach = fmaxf(scale, 1.f), center = (place + 0.5f) * scale;
  int first = max((int)ceilf(center - reach - 0.5f), 0), last = min((int)floorf(center + reach - 0.5f), length - 1);
  return {first, last, center, 1 / reach};
}

// Converts a byte to float by putting it into the mantissa of 2^23; a conversion instruction has a quarter of the throughput.
__device__ float as_float(uchar level) { return __uint_as_float(0x4b000000u | level) - 8388608.f; }

template <int SIZE>
__global__ void __launch_bounds__(256) crop(const uchar* x, const long long* tops, const long long* lefts,
                                            const long long* heights, const long long* widths, const bool* flips, uchar* out,
                                            int rows, int columns) {
  constexpr int P = SIZE * SIZE;
  int n = blockIdx.x;
  size_t plane = (size_t)rows * columns;
  x += n * 3 * plane + tops[n] * columns + lefts[n], out += (size_t)n * 3 * P;
  int height = heights[n], width = widths[n];
  bool flip = flips[n];
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < P; i += gridDim.y * blockDim.x) {
    int column = i % SIZE;
    Taps down = taps_of<SIZE>(i / SIZE, height), across = taps_of<SIZE>(flip ? SIZE - 1 - column : column, width);
    float sum[3] = {}, total_down = 0.f, total_across = 0.f;
    for (int k = across.first; k <= across.last; k++) total_across += across.weight(k + 0.5f);
    for (int j = down.first; j <= down.last; j++) {
      float w = down.weight(j + 0.5f), line[3] = {}, middle = across.first + 0.5f;
      total_down += w;
      const uchar* at = x + (size_t)j * columns + across.first;
      for (int k = across.first; k <= across.last; k++, at++, middle += 1) {
        float share = across.weight(middle);
        line[0] += share * as_float(at[0]), line[1] += share * as_float(at[plane]), line[2] += share * as_float(at[2 * plane]);
      }
      for (int c = 0; c < 3; c++) sum[c] += w * line[c];
    }
    for (int c = 0; c < 3; c++) out[c * P + i] = (uchar)fminf(fmaxf(rintf(sum[c] / (total_down * total_across)), 0.f), 255.f);
  }
}

// ops.normalize of x (FLOATS: floats in [0, 1]; otherwise bytes, converted by to_float), as bits of bf16 with channels last.
template <bool FLOATS>
__global__ void __launch_bounds__(256) normalize(const void* x, const float* mean, const float* std, unsigned short* out, int P) {
  const size_t image = (size_t)blockIdx.x * 3 * P;
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < P; i += gridDim.y * blockDim.x) {
    for (int c = 0; c < 3; c++) {
      size_t from = image + (size_t)c * P + i;
      float level = FLOATS ? ((const float*)x)[from] : ((const uchar*)x)[from] * (1.f / 255);
      union { float number; unsigned bits; } y = {(level - mean[c]) / std[c]};
      out[image + 3 * i + c] = (y.bits + 0x7fff + (y.bits >> 16 & 1)) >> 16;  // rounds to nearest, ties to even
    }
  }
}

// Operations on floats in [0, 1]

__device__ float luminance(float r, float g, float b) { return 0.2989f * r + 0.587f * g + 0.114f * b; }

__device__ float clamp01(float x) { return fminf(fmaxf(x, 0.f), 1.f); }

// Returns the sum of `mine` over all threads, to each thread.
__device__ float sum_of(float mine, float* warps) {
  for (int far = 16; far; far /= 2) mine += __shfl_xor_sync(~0u, mine, far);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  float total = 0.f;
  for (int w = 0; w < blockDim.x / 32; w++) total += warps[w];
  return total;
}

__device__ void shift_hue(float& r, float& g, float& b, float hue) {
  float value = fmaxf(fmaxf(r, g), b), chroma = value - fminf(fminf(r, g), b), unit = chroma > 0.f ? chroma : 1.f;
  float sixths = (value == r ? (g - b) / unit : value == g ? 2 + (b - r) / unit : 4 + (r - g) / unit) + 6 * hue;
  float* to[3] = {&r, &g, &b};
  for (int c = 0; c < 3; c++) {
    float phase = sixths + (5 - 2 * c);  // from -3 to 13; the next line is an exact remainder by 6 without a division
    phase += phase < 0.f ? 6.f : phase < 6.f ? 0.f : phase < 12.f ? -6.f : -12.f;
    *to[c] = value - chroma * clamp01(2 - fabsf(phase - 2));
  }
}

template <int SIDE> constexpr int RADIUS = 6 < SIDE ? 6 : SIDE - 1;  // of the blur in pixels; ops.BLUR_RADIUS
template <int SIDE> constexpr int SEGMENT = SIDE < 128 ? SIDE : 128;  // pixels of a row that a warp blurs at a time
template <int SIDE> constexpr int LINE = SEGMENT<SIDE> + 2 * RADIUS<SIDE>;  // pixels that it needs for this
constexpr int STRIP = 8;  // rows that a thread blurs at a time

// Reflects a position at the border. Positions further out than that are clamped; their values are not used.
template <int SIDE>
__device__ int mirrored(int place) {
  place = place < 0 ? -place : place;
  return max(place < SIDE ? place : 2 * SIDE - 2 - place, 0);
}

// Blurs along the columns. Neighboring threads process neighboring columns; a thread loads each pixel once for several rows.
template <int SIDE>
__device__ void blur_down(const float* from, float* to, const float* taps) {
  constexpr int R = RADIUS<SIDE>, STRIPS = (SIDE + STRIP - 1) / STRIP;
  for (int i = threadIdx.x; i < 3 * STRIPS * SIDE; i += blockDim.x) {
    int row = i / SIDE % STRIPS * STRIP, at = i / (STRIPS * SIDE) * SIDE * SIDE + i % SIDE;
    float window[STRIP + 2 * R];
    #pragma unroll
    for (int k = 0; k < STRIP + 2 * R; k++) window[k] = from[at + mirrored<SIDE>(row + k - R) * SIDE];
    #pragma unroll
    for (int r = 0; r < STRIP; r++) {
      float total = 0.f;
      #pragma unroll
      for (int k = 0; k <= 2 * R; k++) total += taps[k] * window[r + k];
      if (row + r < SIDE) to[at + (row + r) * SIDE] = total;
    }
  }
}

// Blurs along the rows. A warp copies a segment to shared memory first. `lines` has LINE floats for each warp.
template <int SIDE>
__device__ void blur_across(const float* from, float* to, const float* taps, float* lines) {
  constexpr int R = RADIUS<SIDE>, SEGMENTS = (SIDE + SEGMENT<SIDE> - 1) / SEGMENT<SIDE>;
  int lane = threadIdx.x % 32;
  float* line = lines + threadIdx.x / 32 * LINE<SIDE>;
  for (int i = threadIdx.x / 32; i < 3 * SIDE * SEGMENTS; i += blockDim.x / 32) {
    int row = i / SEGMENTS * SIDE, first = i % SEGMENTS * SEGMENT<SIDE>;
    for (int k = lane; k < LINE<SIDE>; k += 32) line[k] = from[row + mirrored<SIDE>(first + k - R)];
    __syncwarp();
    for (int k = lane; k < SEGMENT<SIDE> && first + k < SIDE; k += 32) {
      float total = 0.f;
      #pragma unroll
      for (int t = 0; t <= 2 * R; t++) total += taps[t] * line[k + t];
      to[row + first + k] = total;
    }
    __syncwarp();
  }
}

struct Pixel { float r, g, b; };

// The color changes of an image, in the order of application: 0 brightness, 1 contrast, 2 saturation, 3 hue. Kinds and factors are
// copied to registers once, because the compiler must assume that writing to an image changes them in memory.
template <int TURNS>
struct Jitter {
  int kinds[TURNS];
  float factors[TURNS];

  __device__ Jitter(const long long* order, const float* of_kinds, float hue) {
    for (int turn = 0; turn < TURNS; turn++) {
      kinds[turn] = order[turn];
      factors[turn] = kinds[turn] == 3 ? hue : of_kinds[kinds[turn]];
    }
  }

  // Applies all changes, or only those before contrast. `mean` is the mean luminance of the image before contrast.
  __device__ Pixel change(Pixel p, float mean, bool all) {
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      int kind = kinds[turn];
      float f = factors[turn];
      if (kind == 1 && !all) break;
      if (kind == 3) {
        shift_hue(p.r, p.g, p.b, f);
        continue;
      }
      float start = kind == 0 ? 0.f : kind == 1 ? mean : luminance(p.r, p.g, p.b);
      p = {clamp01(f * p.r + (1 - f) * start), clamp01(f * p.g + (1 - f) * start), clamp01(f * p.b + (1 - f) * start)};
    }
    return p;
  }
};

__device__ Pixel pixel_of(const uchar* x, int i, int P) {
  return {x[i] * (1.f / 255), x[P + i] * (1.f / 255), x[2 * P + i] * (1.f / 255)};
}

template <int SIDE, class Jitter>
__device__ float mean_before_contrast(const uchar* x, Jitter& jitter, float* warps) {
  constexpr int P = SIDE * SIDE;
  float mine = 0.f;
  for (int i = threadIdx.x; i < P; i += blockDim.x) {
    Pixel p = jitter.change(pixel_of(x, i, P), 0.f, false);
    mine += luminance(p.r, p.g, p.b);
  }
  return sum_of(mine, warps) / P;
}

// color.tone_jitter of to_float(x), converted by to_uint8.
template <int SIDE>
__global__ void __launch_bounds__(THREADS<SIDE>) apply_tone(const uchar* x, const float* factors, const long long* orders,
                                                                uchar* out) {
  constexpr int P = SIDE * SIDE;
  __shared__ float warps[THREADS<SIDE> / 32];
  int n = blockIdx.x;
  x += (size_t)n * 3 * P, out += (size_t)n * 3 * P;
  Jitter<3> jitter(orders + n * 3, factors + n * 3, 0.f);
  float mean = mean_before_contrast<SIDE>(x, jitter, warps);
  for (int i = threadIdx.x; i < P; i += blockDim.x) {
    Pixel p = jitter.change(pixel_of(x, i, P), mean, true);
    out[i] = (uchar)rintf(255 * p.r), out[P + i] = (uchar)rintf(255 * p.g), out[2 * P + i] = (uchar)rintf(255 * p.b);
  }
}

// policies.apply_sim of to_float(x): color jitter in the order of each sample, grayscale, blur. `near` is a scratch buffer of one
// image per sample, used if two images do not fit into shared memory.
template <int SIDE>
__global__ void __launch_bounds__(THREADS<SIDE>) apply_sim(const uchar* x, const bool* jittered, const float* factors,
                                                               const float* hues, const long long* orders, const bool* grays,
                                                               const float* sigmas, float* out, float* near) {
  constexpr int P = SIDE * SIDE, R = RADIUS<SIDE>, WARPS = THREADS<SIDE> / 32;
  constexpr bool HERE = 6 * P * sizeof(float) <= SHARED;
  __shared__ float room[HERE ? 6 * P : 1], warps[WARPS], taps[2 * R + 1], lines[WARPS * LINE<SIDE>];
  int n = blockIdx.x;
  x += (size_t)n * 3 * P, out += (size_t)n * 3 * P;
  float *image = HERE ? room : out, *other = HERE ? room + 3 * P : near + (size_t)n * 3 * P;
  Jitter<4> jitter(orders + n * 4, factors + n * 3, hues[n]);
  bool tinted = jittered[n], gray = grays[n];
  float mean = tinted ? mean_before_contrast<SIDE>(x, jitter, warps) : 0.f;
  for (int i = threadIdx.x; i < P; i += blockDim.x) {
    Pixel p = pixel_of(x, i, P);
    if (tinted) p = jitter.change(p, mean, true);
    if (gray) p.r = p.g = p.b = luminance(p.r, p.g, p.b);
    image[i] = p.r, image[P + i] = p.g, image[2 * P + i] = p.b;
  }
  float sigma = sigmas[n];
  if (sigma > 0.f) {
    if (threadIdx.x == 0) {
      float total = 0.f;
      for (int k = -R; k <= R; k++) total += taps[k + R] = expf(-0.5f * (k / sigma) * (k / sigma));
      for (int k = 0; k <= 2 * R; k++) taps[k] /= total;
    }
    __syncthreads();
    blur_down<SIDE>(image, other, taps);
    __syncthreads();
    blur_across<SIDE>(other, image, taps, lines);
  }
  if (!HERE) return;
  __syncthreads();
  for (int i = threadIdx.x; i < 3 * P; i += blockDim.x) out[i] = image[i];
}
