// Copies images of different sizes, each (channel, row, column), to the upper left corners of square canvases.

using uchar = unsigned char;

struct Image {
  const uchar* pixels;  // null if this canvas has no image
  long long height, width;
};

// A column of the grid for each image; the rows of the grid share its pixels. Copies 16 bytes at a time if all rows are aligned.
__global__ void __launch_bounds__(256) copy_to_canvases(const Image* images, uchar* canvases, int side) {
  Image image = images[blockIdx.x];
  if (image.pixels == nullptr) return;
  uchar* canvas = canvases + (size_t)blockIdx.x * 3 * side * side;
  bool wide = image.width % 16 == 0 && side % 16 == 0 && (size_t)image.pixels % 16 == 0;
  int height = image.height, across = image.width / (wide ? 16 : 1);
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < 3 * height * across; i += gridDim.y * blockDim.x) {
    int row = i / across, column = i % across;
    uchar* line = canvas + (size_t)(row / height * side + row % height) * side;
    if (wide) ((uint4*)line)[column] = ((const uint4*)image.pixels)[i];
    else line[column] = image.pixels[i];
  }
}
