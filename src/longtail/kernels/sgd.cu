// Updates all tensors of a network in one launch: a step of SGD, or of the exponential moving average of a key network.
//
// Each block processes one piece: up to PIECE_SIZE (sgd.py) consecutive elements of one tensor.

struct Piece { float *to, *with; long long tensor, start, n; };

constexpr int MAX_TENSORS = 256;  // of a launch; the addresses of their gradients are passed by value
struct Gradients { const float* of[MAX_TENSORS]; };

// A piece has the parameter in `to` and the momentum buffer, which starts at zero, in `with`.
extern "C" __global__ void __launch_bounds__(256) sgd(const Piece* pieces, Gradients gradients, const float* rate, float decay,
                                                      float momentum, int nesterov) {
  Piece p = pieces[blockIdx.x];
  for (int i = p.start + threadIdx.x; i < p.start + p.n; i += 256) {
    float d = gradients.of[p.tensor][i] + decay * p.to[i], v = momentum * p.with[i] + d;
    p.with[i] = v;
    p.to[i] -= *rate * (nesterov ? d + momentum * v : v);
  }
}

// A piece has the average in `to` and the new value in `with`; to += weight * (with - to).
extern "C" __global__ void __launch_bounds__(256) update_average(const Piece* pieces, float weight) {
  Piece p = pieces[blockIdx.x];
  for (int i = p.start + threadIdx.x; i < p.start + p.n; i += 256) p.to[i] += weight * (p.with[i] - p.to[i]);
}
