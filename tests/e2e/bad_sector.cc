// Preloaded by files_test.py, resume_test.py and checkpoint_reading_test.py: the file that the test
// named cannot be read, as on a drive whose sector went bad, or not soon.
//   FERRY_TEST_BAD_FILE=PATH
//   FERRY_TEST_GOOD_READS=17   these many reads of it still succeed; or
//   FERRY_TEST_BAD_BELOW=4096  what begins below this offset can be neither read nor written; or
//   FERRY_TEST_READ_TAKES=0.2  seconds, each read of it
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <thread>

namespace {

std::atomic<long> reads = 0;

bool is_the_bad_file(int file) {
    const char* name = std::getenv("FERRY_TEST_BAD_FILE");
    struct stat bad {
    }, used{};
    return name && stat(name, &bad) == 0 && fstat(file, &used) == 0 && bad.st_ino == used.st_ino &&
           bad.st_dev == used.st_dev;
}

bool is_in_bad_sector(int file, off_t offset) {
    const char* below = std::getenv("FERRY_TEST_BAD_BELOW");
    return below && is_the_bad_file(file) && offset < std::strtol(below, nullptr, 10);
}

bool is_bad(int file, off_t offset) {
    if (is_in_bad_sector(file, offset)) return true;
    const char* good = std::getenv("FERRY_TEST_GOOD_READS");
    return good && is_the_bad_file(file) && ++reads > std::strtol(good, nullptr, 10);
}

void take_time(int file) {
    const char* seconds = std::getenv("FERRY_TEST_READ_TAKES");
    if (seconds && is_the_bad_file(file))
        std::this_thread::sleep_for(std::chrono::duration<double>(std::strtod(seconds, nullptr)));
}

using Read = ssize_t (*)(int, void*, size_t, off_t);

ssize_t read_unless_bad(const char* symbol, int file, void* to, size_t bytes, off_t offset) {
    take_time(file);
    if (is_bad(file, offset)) {
        errno = EIO;
        return -1;
    }
    return reinterpret_cast<Read>(dlsym(RTLD_NEXT, symbol))(file, to, bytes, offset);
}

using Write = ssize_t (*)(int, const void*, size_t, off_t);

ssize_t write_unless_bad(const char* symbol, int file, const void* from, size_t bytes,
                         off_t offset) {
    if (is_in_bad_sector(file, offset)) {
        errno = EIO;
        return -1;
    }
    return reinterpret_cast<Write>(dlsym(RTLD_NEXT, symbol))(file, from, bytes, offset);
}

}  // namespace

extern "C" {

ssize_t pread(int file, void* to, size_t bytes, off_t offset) {
    return read_unless_bad("pread", file, to, bytes, offset);
}
ssize_t pread64(int file, void* to, size_t bytes, off64_t offset) {
    return read_unless_bad("pread64", file, to, bytes, offset);
}
ssize_t pwrite(int file, const void* from, size_t bytes, off_t offset) {
    return write_unless_bad("pwrite", file, from, bytes, offset);
}
ssize_t pwrite64(int file, const void* from, size_t bytes, off64_t offset) {
    return write_unless_bad("pwrite64", file, from, bytes, offset);
}
}
