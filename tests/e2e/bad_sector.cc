// Preloaded by files_test.py: from some read on, the file that the test named cannot be read, as on
// a drive whose sector went bad.
//   FERRY_TEST_BAD_FILE=PATH
//   FERRY_TEST_GOOD_READS=17  these many reads of it still succeed
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>

namespace {

std::atomic<long> reads = 0;

bool is_bad(int file) {
    const char* name = std::getenv("FERRY_TEST_BAD_FILE");
    const char* good = std::getenv("FERRY_TEST_GOOD_READS");
    struct stat bad {
    }, read{};
    if (!name || !good || stat(name, &bad) != 0 || fstat(file, &read) != 0) return false;
    if (bad.st_ino != read.st_ino || bad.st_dev != read.st_dev) return false;
    return ++reads > std::strtol(good, nullptr, 10);
}

using Read = ssize_t (*)(int, void*, size_t, off_t);

ssize_t read_unless_bad(const char* symbol, int file, void* to, size_t bytes, off_t offset) {
    if (is_bad(file)) {
        errno = EIO;
        return -1;
    }
    return reinterpret_cast<Read>(dlsym(RTLD_NEXT, symbol))(file, to, bytes, offset);
}

}  // namespace

extern "C" {

ssize_t pread(int file, void* to, size_t bytes, off_t offset) {
    return read_unless_bad("pread", file, to, bytes, offset);
}
ssize_t pread64(int file, void* to, size_t bytes, off64_t offset) {
    return read_unless_bad("pread64", file, to, bytes, offset);
}
}
