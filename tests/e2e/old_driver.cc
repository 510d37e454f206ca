// Stands in for the NVIDIA driver's library, libcuda.so.1, as one of CUDA 11.4's time.
extern "C" {

int cuDriverGetVersion(int* version) {
    *version = 11040;
    return 0;
}

int cuInit(unsigned /*flags*/) { return 0; }
}
