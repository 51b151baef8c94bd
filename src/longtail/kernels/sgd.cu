// All tensors of a network in one launch: a step of SGD, or of the moving average by which a key network follows.
//
// A block works on a piece: at most as many neighboring numbers of one tensor as `update.py` says.

struct Piece { float *to, *with; long long tensor, start, n; };

constexpr int MOST = 256;  // tensors of a launch, as their gradients' addresses are passed by value
struct Gradients { const float* of[MOST]; };

// with: the momentum, which starts at zero.
extern "C" __global__ void __launch_bounds__(256) sgd(const Piece* pieces, Gradients gradients, const float* rate, float decay,
                                                      float momentum, int nesterov) {
  Piece p = pieces[blockIdx.x];
  for (int i = p.start + threadIdx.x; i < p.start + p.n; i += 256) {
    float d = gradients.of[p.tensor][i] + decay * p.to[i], v = momentum * p.with[i] + d;
    p.with[i] = v;
    p.to[i] -= *rate * (nesterov ? d + momentum * v : v);
  }
}

// with: whom to follow, by so large a share of the way.
extern "C" __global__ void __launch_bounds__(256) follow(const Piece* pieces, float share) {
  Piece p = pieces[blockIdx.x];
  for (int i = p.start + threadIdx.x; i < p.start + p.n; i += 256) p.to[i] += share * (p.with[i] - p.to[i]);
}
