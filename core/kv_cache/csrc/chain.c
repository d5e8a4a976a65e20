/* octavo.core.kv_cache._chain: SHA-256 keys of the prefix cache, for processors with SHA instructions (SHA-NI).

   hashing.py has the same two functions in Python, over hashlib; tests/core/kv_cache/test_chain.py holds both equal. A key
   is SHA-256(parent | tokens of one block | extra keys). One call makes many keys: what hashlib costs a call, about 0.8
   microseconds, is several times what these 96 bytes cost to hash.

   SHA-256: FIPS 180-4, section 6.2. Only the stable ABI of CPython 3.11 is used, so one build serves every later version.
*/
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_SHA_NI 1
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { BLOCK = 64, DIGEST = 32 };

#ifdef HAVE_SHA_NI

static const uint32_t ROUND_CONSTANTS[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static int ask_processor(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1))
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29));
}

/* The digest of a padded message of `blocks` blocks. */
__attribute__((target("sha,sse4.1,ssse3"))) static void digest(const uint8_t *message, size_t blocks, uint8_t out[DIGEST])
{
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    /* The instructions want the eight state words as A B E F and C D G H, from the highest lane down. */
    __m128i abef = _mm_set_epi32(0x6a09e667, (int)0xbb67ae85, 0x510e527f, (int)0x9b05688c);
    __m128i cdgh = _mm_set_epi32(0x3c6ef372, (int)0xa54ff53a, 0x1f83d9ab, 0x5be0cd19);

    for (size_t block = 0; block < blocks; block++, message += BLOCK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4]; /* the last sixteen words of the message schedule */
#pragma GCC unroll 16
        for (int group = 0; group < 16; group++) { /* four rounds each */
            __m128i *const oldest = &w[group & 3], newest = w[(group + 3) & 3];
            if (group < 4) {
                *oldest = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)message + group), big_endian);
            } else {
                const __m128i seven_back = _mm_alignr_epi8(newest, w[(group + 2) & 3], 4);
                const __m128i partial = _mm_add_epi32(_mm_sha256msg1_epu32(*oldest, w[(group + 1) & 3]), seven_back);
                *oldest = _mm_sha256msg2_epu32(partial, newest);
            }
            const __m128i added = _mm_add_epi32(*oldest, _mm_load_si128((const __m128i *)ROUND_CONSTANTS + group));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, added);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(added, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i abcd = _mm_unpackhi_epi64(cdgh, abef), efgh = _mm_unpacklo_epi64(cdgh, abef);
    const __m128i reversed = _mm_set_epi64x(0x0001020304050607LL, 0x08090a0b0c0d0e0fLL); /* words and bytes */
    _mm_storeu_si128((__m128i *)out, _mm_shuffle_epi8(abcd, reversed));
    _mm_storeu_si128((__m128i *)out + 1, _mm_shuffle_epi8(efgh, reversed));
}

#else

static int ask_processor(void)
{
    return 0;
}

static void digest(const uint8_t *message, size_t blocks, uint8_t out[DIGEST])
{
    (void)message, (void)blocks, (void)out;
}

#endif

static int supported; /* asked once: the instruction that asks costs microseconds in a virtual machine */

/* A message with its padding: parent | tokens | extra | 0x80 | zeros | length in bits. */
typedef struct {
    uint8_t *bytes;
    size_t room, blocks, parent, stride, extra;
} Message;

/* Lay the message out for parts of these sizes; 0 and an exception when there is no memory. */
static int lay_out(Message *m, size_t parent, size_t stride, const uint8_t *extra, size_t extra_size)
{
    const size_t size = parent + stride + extra_size;
    m->blocks = (size + 8) / BLOCK + 1;
    if (m->blocks * BLOCK > m->room) {
        uint8_t *bytes = PyMem_Realloc(m->bytes, m->blocks * BLOCK);
        if (bytes == NULL) {
            PyErr_NoMemory();
            return 0;
        }
        m->bytes = bytes;
        m->room = m->blocks * BLOCK;
    }
    m->parent = parent, m->stride = stride, m->extra = extra_size;
    uint8_t *end = m->bytes + m->blocks * BLOCK;
    memcpy(m->bytes + parent + stride, extra, extra_size);
    memset(m->bytes + size, 0, (size_t)(end - (m->bytes + size)));
    m->bytes[size] = 0x80;
    const uint64_t bits = (uint64_t)size * 8;
    for (int i = 0; i < 8; i++)
        end[-1 - i] = (uint8_t)(bits >> (8 * i));
    return 1;
}

/* The key of one block, as a new bytes object; NULL with an exception. */
static PyObject *key_of(Message *m, const uint8_t *parent, const uint8_t *tokens)
{
    uint8_t out[DIGEST];
    memcpy(m->bytes, parent, m->parent);
    memcpy(m->bytes + m->parent, tokens, m->stride);
    digest(m->bytes, m->blocks, out);
    return PyBytes_FromStringAndSize((const char *)out, DIGEST);
}

/* The tokens' buffer as whole blocks; -1 with an exception. */
static Py_ssize_t whole_blocks(const Py_buffer *data, Py_ssize_t stride)
{
    if (!supported) {
        PyErr_SetString(PyExc_RuntimeError, "this processor has no SHA instructions; use hashlib");
        return -1;
    }
    if (stride < 1) {
        PyErr_Format(PyExc_ValueError, "stride must be at least 1 byte, not %zd", stride);
        return -1;
    }
    return data->len / stride;
}

static PyObject *chain(PyObject *self, PyObject *args)
{
    Py_buffer parent = {0}, data = {0}, extra = {0};
    Py_ssize_t stride;
    PyObject *keys = NULL;
    Message m = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*ny*", &parent, &data, &stride, &extra))
        return NULL;
    const Py_ssize_t count = whole_blocks(&data, stride);
    if (count < 0 || (keys = PyList_New(count)) == NULL)
        goto done;
    const uint8_t *above = parent.buf, *tokens = data.buf;
    size_t above_size = (size_t)parent.len;
    for (Py_ssize_t i = 0; i < count; i++, tokens += stride) {
        PyObject *key = NULL;
        if ((i > 0 && above_size == m.parent) || lay_out(&m, above_size, (size_t)stride, extra.buf, (size_t)extra.len))
            key = key_of(&m, above, tokens);
        if (key == NULL) {
            Py_CLEAR(keys);
            break;
        }
        PyList_SetItem(keys, i, key);
        above = (const uint8_t *)PyBytes_AsString(key);
        above_size = DIGEST;
    }
done:
    PyMem_Free(m.bytes);
    PyBuffer_Release(&parent);
    PyBuffer_Release(&data);
    PyBuffer_Release(&extra);
    return keys;
}

static PyObject *each(PyObject *self, PyObject *args)
{
    Py_buffer data = {0};
    Py_ssize_t stride;
    PyObject *parents, *extras, *keys = NULL;
    Message m = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "O!y*nO!", &PyList_Type, &parents, &data, &stride, &PyList_Type, &extras))
        return NULL;
    const Py_ssize_t count = whole_blocks(&data, stride);
    if (count < 0)
        goto done;
    if (PyList_Size(parents) != count || PyList_Size(extras) != count) {
        PyErr_Format(PyExc_ValueError, "%zd blocks need as many parents and extras, not %zd and %zd", count,
                     PyList_Size(parents), PyList_Size(extras));
        goto done;
    }
    if ((keys = PyList_New(count)) == NULL)
        goto done;
    const uint8_t *tokens = data.buf;
    for (Py_ssize_t i = 0; i < count; i++, tokens += stride) {
        char *above, *more;
        Py_ssize_t above_size, more_size;
        PyObject *key = NULL;
        if (PyBytes_AsStringAndSize(PyList_GetItem(parents, i), &above, &above_size) == 0 &&
            PyBytes_AsStringAndSize(PyList_GetItem(extras, i), &more, &more_size) == 0 &&
            ((m.blocks && more_size == 0 && m.extra == 0 && m.parent == (size_t)above_size) ||
             lay_out(&m, (size_t)above_size, (size_t)stride, (const uint8_t *)more, (size_t)more_size)))
            key = key_of(&m, (const uint8_t *)above, tokens);
        if (key == NULL) {
            Py_CLEAR(keys);
            break;
        }
        PyList_SetItem(keys, i, key);
    }
done:
    PyMem_Free(m.bytes);
    PyBuffer_Release(&data);
    return keys;
}

static PyObject *is_supported(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyBool_FromLong(supported);
}

static PyMethodDef METHODS[] = {
    {"chain", chain, METH_VARARGS,
     "chain(parent, data, stride, extra)\n\nKeys of consecutive blocks of `stride` bytes in `data`, each the next one's parent."},
    {"each", each, METH_VARARGS,
     "each(parents, data, stride, extras)\n\nThe key of every block of `stride` bytes in `data`, under its own parent and extra."},
    {"supported", is_supported, METH_NOARGS, "Whether this processor has the instructions."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {{0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "octavo.core.kv_cache._chain", "SHA-256 keys of blocks, many a call.", 0, METHODS, SLOTS,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__chain(void)
{
    supported = ask_processor();
    return PyModuleDef_Init(&MODULE);
}
